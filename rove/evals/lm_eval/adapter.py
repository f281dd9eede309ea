"""Our model behind the interface of lm-evaluation-harness, by the conventions of its `hf` backend.

No token is put in front of a text, but end-of-text where a context is empty; `<|endoftext|>` in a
text is the token; what is too long loses its start. Every rank gets all requests, batches are dealt
out and answers gathered: prompts, their order and batches are the same for any number of ranks.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models import utils as conventions
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rove import device as dev
from rove import distributed as dist
from rove.evals.cost import forward_flops
from rove.evals.session import Session
from rove.tokenizer import EOT_TEXT, Tokenizer

MAX_GEN_TOKS = 256  # tokens to write where a task does not say
FIRST_STEP = 32  # tokens that are written before a text is looked at for its stops
HEAD_CHUNK = 1024  # positions with logits at once

Ids = list[int]
Answer = tuple[float, bool]  # log-probability in nats, whether each token is the likeliest


class Span(NamedTuple):
    """Targets behind their inputs: the last len(targets) inputs predict them."""

    inputs: tuple[int, ...]
    targets: Ids


class Writing(NamedTuple):
    """A text to be written: at most `most` tokens, cut before the first of `until`."""

    prompt: Ids
    most: int
    until: list[str]
    how: dict[str, Any]  # temperature, top_k, top_p


class RoveLM(TemplateLM):
    """A session's model. `seed` is that of drawn texts, for which few tasks ask."""

    def __init__(self, e: Session, tokenizer: Tokenizer, max_length: int, seed: int) -> None:
        super().__init__()
        self.session, self.vocabulary = e, tokenizer
        self.max_length, self.seed = max_length, seed

    @property
    def eot_token_id(self) -> int:
        return self.vocabulary.eot_id

    def tok_encode(self, string: str, add_special_tokens: Any = None, **kwargs: Any) -> Ids:
        """Return the ids of a text; `<|endoftext|>` in it becomes the token."""
        ids: Ids = []
        for number, part in enumerate(string.split(EOT_TEXT)):
            ids += [self.eot_token_id] * (number > 0) + self.vocabulary.encode(part).tolist()
        return ids

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[Answer]:
        """Return the log-probability of each continuation of a context (nats), and if it is greedy.

        Raises ValueError for a continuation without tokens or with more than max_length.
        """
        for request in requests:
            if not request.args[1]:
                raise ValueError(f"task {request.task_name}, item {request.doc_id}: empty option")
        return list(super().loglikelihood(requests, disable_tqdm=True))

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text (nats), in windows of max_length tokens."""
        spans, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.eot_token_id, self.max_length, 1)
            for context, targets in map(make_disjoint_window, windows):
                spans.append(self._span(context, targets))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._score(spans), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, cut before the first of its stops."""
        jobs = [self._writing(request) for request in requests]
        kinds: dict[Any, list[int]] = {}  # drawn texts by themselves, greedy ones by their room
        for number, job in enumerate(jobs):
            kinds.setdefault((number,) if job.how["temperature"] else job.most, []).append(number)
        batches = []
        for numbers in kinds.values():
            lengths = [len(jobs[i].prompt) + jobs[i].most for i in numbers]
            batches += [[numbers[i] for i in group] for group in self._batches(lengths)]
        self.session.say(f"  {len(jobs):,} texts to write")

        def write(batch: list[int]) -> dict[int, str]:
            return dict(zip(batch, self._write([jobs[i] for i in batch], batch[0]), strict=True))

        return self._share(batches, write, "text")

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[Answer]:
        return self._score([self._span(context, ids) for _, context, ids in requests])

    def _span(self, context: Ids, targets: Ids) -> Span:
        """Return the last max_length + 1 tokens, the final one of which is no input."""
        if not 1 <= len(targets) <= self.max_length:
            option = f"option {self.vocabulary.decode(targets)[:40]!r} of {len(targets)} tokens"
            raise ValueError(f"{option}: needs 1 to max_length={self.max_length}; set --max_length")
        ids = [*(context or [self.eot_token_id]), *targets][-(self.max_length + 1) :]
        return Span(tuple(ids[:-1]), targets)

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the numbers of rows in batches, longest first.

        A batch takes the place of batch_size rows of max_length tokens, or is one row.
        """
        room = self.session.settings.batch_size * self.max_length
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        batches, first = [], 0
        while first < len(order):
            last = first + max(1, room // lengths[order[first]])
            batches.append(order[first:last])
            first = last
        return batches

    def _share(
        self, batches: list[list[int]], work: Callable[[list[int]], dict[int, Any]], unit: str
    ) -> list[Any]:
        """Return what the batches give for every number from 0, worked on by all ranks."""
        world = self.session.world
        found: dict[int, Any] = {}
        own = batches[world.rank :: world.size]
        bar = self.session.bar(sum(map(len, own)), unit)
        for batch in own:
            found |= work(batch)
            bar.update(len(batch))
        bar.close()
        merged = {number: answer for part in dist.gather(found) for number, answer in part.items()}
        return [merged[number] for number in range(len(merged))]

    def _score(self, spans: Sequence[Span]) -> list[Answer]:
        """Return the answer for each span; spans of equal inputs share a row."""
        sharing: dict[tuple[int, ...], list[int]] = {}
        for number, span in enumerate(spans):
            sharing.setdefault(span.inputs, []).append(number)
        rows, e, config = list(sharing), self.session, self.session.model.config
        flops = forward_flops(config, 0, sum(len(span.targets) for span in spans))
        flops += sum(forward_flops(config, len(row), 0) for row in rows)
        e.say(f"  {len(spans):,} continuations in {len(rows):,} rows; {e.describe_cost(flops)}")

        def score(batch: list[int]) -> dict[int, Answer]:
            pairs = [(i, number) for i, row in enumerate(batch) for number in sharing[rows[row]]]
            wanted = [(i, spans[number].targets) for i, number in pairs]
            answers = self._score_rows([rows[row] for row in batch], wanted)
            return {number: answer for (_, number), answer in zip(pairs, answers, strict=True)}

        return self._share(self._batches([len(row) for row in rows]), score, "row")

    @torch.no_grad()
    def _score_rows(
        self, rows: Sequence[Sequence[int]], wanted: Sequence[tuple[int, Ids]]
    ) -> list[Answer]:
        """Return the answer for each (row, ids), the ids behind the last inputs of that row."""
        e, sizes = self.session, [len(ids) for _, ids in wanted]
        padded = pad_sequence([torch.tensor(row) for row in rows], True, self.eot_token_id)
        ends = [row * padded.shape[1] + len(rows[row]) for row, _ in wanted]
        places = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, sizes, strict=True)])
        targets = torch.tensor([i for _, ids in wanted for i in ids]).to(e.device)
        parts = []
        with dev.autocast(e.device, e.dtype):
            x = e.model.hidden(padded.to(e.device)).flatten(0, 1)[places.to(e.device)]
            for part, ids in zip(x.split(HEAD_CHUNK), targets.split(HEAD_CHUNK), strict=True):
                logits = e.model.head(part)
                parts.append(
                    (F.cross_entropy(logits, ids, reduction="none"), logits.argmax(1) == ids)
                )
        losses, tops = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        if not bool(losses.isfinite().all()):
            raise ValueError(f"{e.settings.checkpoint}: a loss is not finite; are the weights?")
        answers = zip(losses.double().split(sizes), tops.split(sizes), strict=True)
        return [(-float(loss.sum()), bool(top.all())) for loss, top in answers]

    def _writing(self, request: Any) -> Writing:
        """Return what a request asks to be written; ValueError for what is not done here."""
        text, asked = request.args
        kwargs: dict[str, Any] = dict(conventions.normalize_gen_kwargs(asked, MAX_GEN_TOKS))
        until = conventions.handle_stop_sequences(kwargs.pop("until"), EOT_TEXT)
        most, draws = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
        how = {"temperature": float(kwargs.pop("temperature", 1.0 if draws else 0.0))}
        how |= {key: kwargs.pop(key, None) for key in ("top_k", "top_p")}
        where = f"task {request.task_name}: generation_kwargs"
        if kwargs.pop("num_beams", 1) != 1 or kwargs:
            raise ValueError(f"{where}: {', '.join(kwargs) or 'num_beams'} cannot be done here")
        if not 1 <= most < self.max_length:
            room = f"max_length={self.max_length} must leave room for a prompt; raise --max_length"
            raise ValueError(f"{where}: max_gen_toks={most}: {room} or lower it in the task")
        prompt = (self.tok_encode(text) or [self.eot_token_id])[-(self.max_length - most) :]
        return Writing(prompt, most, until, how)

    def _write(self, jobs: Sequence[Writing], number: int) -> list[str]:
        """Return the texts of jobs that agree in all but prompt and stops.

        Some tokens are written, then twice as many and so on, by the texts that have no stop yet.
        """
        e, first, eot = self.session, jobs[0], self.eot_token_id
        new: list[Ids] = [[] for _ in jobs]
        texts, going, done, step = [""] * len(jobs), list(range(len(jobs))), 0, FIRST_STEP
        while going and done < first.most:
            step = min(step, first.most - done)
            rows = [torch.tensor(jobs[i].prompt + new[i]) for i in going]
            padded, lengths = pad_sequence(rows, True).to(e.device), [len(row) for row in rows]
            seed = random.Random(f"{self.seed} {number} {done}").getrandbits(62)
            with dev.autocast(e.device, e.dtype):
                out = e.model.generate(padded, step, **first.how, stop_ids=[eot], seed=seed,
                                       prompt_lengths=lengths, max_context=None)  # fmt: skip
            done, left = done + step, []
            for i, row, length in zip(going, out.tolist(), lengths, strict=True):
                new[i] = (new[i] + row[length:])[:done]
                ended = eot in new[i]
                text = self.vocabulary.decode(new[i][: new[i].index(eot)] if ended else new[i])
                texts[i] = conventions.postprocess_generated_text(text, jobs[i].until, None)
                if not ended and texts[i] == text:
                    left.append(i)
            going, step = left, 2 * step
        return texts
