"""Settings of a RoPE or RoVE language model, as config.json holds them."""

from typing import Any

from transformers import PretrainedConfig

POS_MODES = ("rope", "rove", "rope+yarn", "rove+yarn")


class RoveConfig(PretrainedConfig):
    """GPT-2's architecture with rotary positions.

    max_position_embeddings (also n_positions): the training length, from which YaRN's ramp follows;
    longer inputs are accepted. pos_mode: queries and keys rotate (rope), values too (rove); +yarn
    extends the context by yarn_factor. value_path: rope or rove, as the weights were trained.
    """

    model_type = "rove"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "n_positions": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
    }

    def __init__(
        self, vocab_size: int = 50257, max_position_embeddings: int = 1024,
        num_hidden_layers: int = 12, num_attention_heads: int = 12, hidden_size: int = 768,
        dropout: float = 0.0, bias: bool = False, pos_mode: str = "rope",
        value_path: str | None = None, rope_theta: float = 10000.0, yarn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0, yarn_beta_slow: float = 1.0, yarn_values: str = "yarn",
        rotary_pairing: str = "halves", use_cache: bool = True, bos_token_id: int = 50256,
        eos_token_id: int = 50256, tie_word_embeddings: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.hidden_size = hidden_size
        self.dropout = dropout
        self.bias = bias
        self.pos_mode = pos_mode
        self.value_path = value_path
        self.rope_theta = rope_theta
        self.yarn_factor = yarn_factor
        self.yarn_beta_fast = yarn_beta_fast
        self.yarn_beta_slow = yarn_beta_slow
        self.yarn_values = yarn_values
        self.rotary_pairing = rotary_pairing
        self.use_cache = use_cache
        kwargs |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
        super().__init__(**kwargs | {"tie_word_embeddings": tie_word_embeddings})

    def check(self) -> None:
        """Raise ValueError for settings that make no model; they can be changed after __init__."""
        path = str(self.pos_mode).removesuffix("+yarn")
        retrofit = f"trained as {self.value_path}; value_path={path!r} too tries it, known to hurt"
        for key, holds, expected in (
            ("pos_mode", self.pos_mode in POS_MODES, " | ".join(POS_MODES)),
            ("pos_mode", self.value_path in (None, path), retrofit),
            ("rotary_pairing", self.rotary_pairing == "halves", "halves"),
            ("hidden_size", self.hidden_size % (2 * self.num_attention_heads) == 0, "even heads"),
            ("rope_theta", self.rope_theta > 1, "above 1"),
            ("yarn_factor", self.yarn_factor >= 1, "at least 1"),
            ("yarn_beta_slow", 0 < self.yarn_beta_slow < self.yarn_beta_fast, "below the fast"),
            ("yarn_values", self.yarn_values in ("yarn", "orig"), "yarn | orig"),
        ):
            if not holds:
                raise ValueError(f"{key}={getattr(self, key)!r}: must be {expected}")
