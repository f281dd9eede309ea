"""Variable tracking: chains of assignments in filler. `vt` is RULER's, `vt_hops` is ours.

vt asks for all names of a chain, so that much of its answer can be copied from neighbours. vt_hops
has several chains, their statements interleaved, and asks for the value of one variable, which is
`hop` assignments away from its value. One context serves all its variables.
"""

import math
from functools import partial
from random import Random

from rove.evals.ruler.haystacks import FILLER, spread, weave
from rove.evals.ruler.tasks import Draft, Draws
from rove.evals.ruler.words import distinct, draw_letters, twins

N_HOPS = 4
N_NAMES = N_HOPS + 1
N_CHAINS = 2  # of vt_hops
N_VARIABLES = N_CHAINS * N_NAMES
EXAMPLE_TOKENS = 500  # at most, and a quarter of the prompt

HEAD = "The text below assigns values to variables. Memorise them.\n\n"
LIST_TAIL = (
    "\nQuestion: Which variables have the value {value}? "
    "Answer: The {n} variables that have the value {value} are: "
)
VALUE_TAIL = "\nQuestion: What is the value of {name}? Answer: The value of {name} is"


def chain(names: list[str], value: str) -> list[str]:
    """Return the statements of a chain, in order."""
    given = [value, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {what}" for name, what in zip(names, given, strict=False)]


def build_vt(budget: int, draws: Draws, size: int) -> Draft:
    """Make a prompt with one chain among `size` filler lines, behind a worked example.

    One of the statements, in the order of their places, stands at the quantile; the gold is the
    name that it sets. The control has other names at the same places.
    """
    rng = draws.rng
    value, example_value = distinct(partial(_draw_value, rng), 2)
    draw_name = partial(draw_letters, rng, 5, upper=True)
    names = distinct(draw_name, N_NAMES)
    example = _example(rng, example_value, min(EXAMPLE_TOKENS, budget // 4), draws)
    fresh = twins(draw_name, names, draws.count, set(names))
    drawn = spread(draws.order, size + 1, N_NAMES, draws.quantile)
    places = sorted(drawn)
    anchor = places.index(drawn[0])
    head, tail = example + HEAD, LIST_TAIL.format(value=value, n=N_NAMES)

    def prompt_with(names: list[str]) -> tuple[str, list[int]]:
        text, starts = weave([FILLER] * size, chain(names, value), places, "\n")
        return head + text + tail, starts

    prompt, starts = prompt_with(names)
    gold_at = len(head) + starts[anchor] + len("VAR ")
    control = None if fresh is None else prompt_with([fresh[name] for name in names])[0]
    possible = sum(math.log(26**5 - i) for i in range(N_NAMES))
    return Draft(prompt, control, names, gold_at, possible)


def build_hops(variable: int | None, draws: Draws, size: int) -> Draft:
    """Make a prompt with N_CHAINS chains among `size` filler lines and ask for one value.

    variable: which one, below N_VARIABLES, chain after chain; None asks for the one with the
    longest question. Some statement stands at the quantile; the gold is the value. The control has
    another value there.
    """
    rng = draws.rng
    values = distinct(partial(_draw_value, rng), N_CHAINS)
    names = distinct(partial(draw_letters, rng, 5, upper=True), N_VARIABLES)
    fresh = twins(partial(_draw_value, rng), values, draws.count, set(values))
    if variable is None:
        tokens = [draws.count(f" {name}") for name in names]
        variable = tokens.index(max(tokens))
    places = sorted(spread(draws.order, size + 1, N_VARIABLES, draws.quantile))
    turns = [c for c in range(N_CHAINS) for _ in range(N_NAMES)]
    draws.order.shuffle(turns)
    asked, hop = divmod(variable, N_NAMES)
    tail = VALUE_TAIL.format(name=names[variable])

    def prompt_with(values: list[str]) -> tuple[str, int]:
        chains = [
            iter(chain(names[c * N_NAMES : (c + 1) * N_NAMES], values[c])) for c in range(N_CHAINS)
        ]
        text, starts = weave([FILLER] * size, [next(chains[c]) for c in turns], places, "\n")
        root = starts[turns.index(asked)] + len(f"VAR {names[asked * N_NAMES]} = ")
        return HEAD + text + tail, len(HEAD) + root

    prompt, gold_at = prompt_with(values)
    other = [fresh[v] if fresh and c == asked else v for c, v in enumerate(values)]
    control = prompt_with(other)[0] if fresh else None
    return Draft(prompt, control, [values[asked]], gold_at, math.log(90_000), hop)


def _draw_value(rng: Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def _example(rng: Random, value: str, max_tokens: int, draws: Draws) -> str:
    """Return the worked example: names of three letters, and filler while max_tokens allow."""
    names = distinct(partial(draw_letters, rng, 3, upper=True), N_NAMES)
    statements, tail = chain(names, value), LIST_TAIL.format(value=value, n=N_NAMES)
    bare = HEAD + "\n".join(statements) + tail + " ".join(names) + "\n\n"
    room = max_tokens - draws.count(bare)
    n_lines = max(0, room // draws.count(f"{FILLER}\n"))
    if n_lines + 1 < N_NAMES:
        return bare
    places = sorted(draws.order.sample(range(n_lines + 1), N_NAMES))
    text, _ = weave([FILLER] * n_lines, statements, places, "\n")
    return HEAD + text + tail + " ".join(names) + "\n\n"
