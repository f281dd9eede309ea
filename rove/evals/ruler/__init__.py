"""RULER scored by the negative log-likelihood (NLL) of the answer.

Samples are made here (`make_samples`) or read (`read_samples`); wordings are ours, in the structure
of RULER's (arXiv 2404.06654), whose own prompts enter as files. `score_samples` measures them with
a scoring function, `summarize` and `categories` give what a result holds. An NLL says how likely
the answer is, not that it was found: beside it stand exact match and the gain over a control, the
same prompt with other values in the places of the gold ones.
"""

from rove.evals.ruler.files import read_samples, write_samples
from rove.evals.ruler.results import categories, summarize
from rove.evals.ruler.samples import Sample, make_samples
from rove.evals.ruler.scoring import (
    Generate,
    Score,
    answer_tokens,
    score_samples,
    string_match,
)
from rove.evals.ruler.tasks import TASKS, Layout, Sources, Task, needs

__all__ = [
    "TASKS",
    "Generate",
    "Layout",
    "Sample",
    "Score",
    "Sources",
    "Task",
    "answer_tokens",
    "categories",
    "make_samples",
    "needs",
    "read_samples",
    "score_samples",
    "string_match",
    "summarize",
    "write_samples",
]
