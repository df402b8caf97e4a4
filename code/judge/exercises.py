"""All exercises with their cases: the table that the judge works through."""

import functools
from collections.abc import Callable

from judge import after, decoding, functions, gradients, tokens, training
from judge.adapter import AdapterExercise
from judge.answers import executed_answer
from judge.cases import Case, Outcomes
from judge.catalogue import TASKS, Task
from judge.classes import ClassExercise, LatentExercise
from judge.mistakes import Mistake
from judge.subjects import ReferenceClass, Sizes


class FunctionExercise:
    """A function to write, or a class that is judged by its calls alone, and its cases."""

    def __init__(self, task: Task, make_cases: Callable[[], list[Case]]):
        self.task, self.name, self.make_cases = task, task.name, make_cases

    @functools.cached_property
    def cases(self) -> list[Case]:
        """From small to large."""
        return self.make_cases()


Exercise = FunctionExercise | ClassExercise


def sized(names: str, *rows: tuple[int, ...]) -> list[Sizes]:
    """Rows of sizes under their names."""
    return [dict(zip(names.split(), row)) for row in rows]


QUERIES = "d_model n_q_heads n_kv_heads"
HEADS = sized("d_model n_heads d_ff", (24, 4, 20), (6, 1, 10), (30, 3, 14))
CLASSES = {
    "SelfAttention": lambda task: ClassExercise(
        task, "cached", sized(QUERIES, (36, 6, 2), (4, 1, 1), (24, 4, 1), (18, 3, 3)), "steep 0"
    ),
    "EncoderLayer": lambda task: ClassExercise(task, "masked", HEADS),
    "CrossDecoderLayer": lambda task: ClassExercise(task, "memory", HEADS, "steep 2"),
    "GPT2Block": lambda task: ClassExercise(task, "plain", HEADS, "steep 0"),
    "ModernBlock": lambda task: ClassExercise(
        task, "cached",
        sized(f"{QUERIES} d_ff", (36, 6, 2, 20), (4, 1, 1, 7), (24, 4, 1, 15), (18, 3, 3, 13)),
        "steep 2",
    ),
    "ParallelBlock": lambda task: ClassExercise(task, "plain", HEADS, "steep 0"),
    "LatentAttention": lambda task: LatentExercise(
        task, "cached",
        sized("d_model n_heads kv_rank rope_dim nope_dim v_dim",
              (15, 3, 10, 4, 7, 8), (9, 1, 5, 2, 3, 4), (14, 2, 6, 8, 5, 3)),
        "steep 0",
    ),
    "SwitchFFN": lambda task: ClassExercise(
        task, "balance", sized("d_model d_ff n_experts", (6, 7, 5), (4, 3, 2), (8, 9, 3))
    ),
    "MixtralFFN": lambda task: ClassExercise(
        task, "plain",
        sized("d_model d_ff n_experts top_k", (6, 7, 5, 2), (4, 3, 2, 1), (8, 9, 4, 3)),
    ),
    "LoRALinear": lambda task: AdapterExercise(
        task, "plain", sized("in out rank alpha bias", (7, 9, 3, 12, 1), (4, 6, 2, 3, 0))
    ),
    "WindowAttention": lambda task: tokens.WindowExercise(
        task, "cached",
        sized(f"{QUERIES} window", (36, 6, 2, 4), (4, 1, 1, 2), (24, 4, 1, 3), (18, 3, 3, 1)),
        "steep 0",
    ),
}  # fmt: skip
FUNCTIONS = {
    name: cases
    for subject in (functions, decoding, gradients, training, tokens, after)
    for name, cases in subject.CASES.items()
}


@functools.cache
def exercise(name: str) -> Exercise:
    """The exercise of this name with its cases."""
    if name in CLASSES:
        return CLASSES[name](TASKS[name])
    return FunctionExercise(TASKS[name], FUNCTIONS[name])


def answer_outcomes(name: str, *mistakes: Mistake) -> Outcomes:
    """What the cases give for the answer, with mistakes planted in it."""
    return (lately_asked if len(mistakes) > 1 else kept_outcomes)(name, *mistakes)


def new_outcomes(name: str, *mistakes: Mistake) -> Outcomes:
    """The same, nothing of it computed yet."""
    one, answer = exercise(name), executed_answer(name, *mistakes)
    subject = ReferenceClass(one, answer) if isinstance(one, ClassExercise) else answer
    return Outcomes(one.cases, subject)


kept_outcomes = functools.lru_cache(maxsize=400)(new_outcomes)  # an exercise has under 300
lately_asked = functools.lru_cache(maxsize=16)(new_outcomes)  # of thousands of pairs
