"""Tasks of EleutherAI's lm-evaluation-harness, loaded and made into requests, in silence."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from quantkit.errors import InputError, suggest
from quantkit.tasks.items import sampled

SHOTS_SEED: Final = 1234
"""What the harness draws few-shot examples with."""


def loaded_task(source: str) -> Any:
    """Returns the harness's task of this name, or of this YAML file.

    Raises:
        InputError: the harness is not installed, it has no such task or several, or the task's data
            cannot be had.
    """
    try:
        tasks: Any = importlib.import_module("lm_eval.tasks")
    except ImportError:
        raise InputError(
            f"lm-eval={source} needs EleutherAI's harness, which is missing: pip install "
            "'quantkit[data]'."
        ) from None
    path = Path(source).expanduser()
    name = source
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise InputError(f"lm-eval={source}: no such file.")
        manager = tasks.TaskManager(include_path=str(path.parent), include_defaults=False)
        index = manager.task_index.items()
        names = [n for n, e in index if e.yaml_path and e.yaml_path.resolve() == path.resolve()]
        if not names:
            raise InputError(
                f"lm-eval={source}: expected a task of lm-eval: YAML with a name in 'task'."
            )
        name = names[0]
    else:
        manager = _everything()
        if name not in manager.all_tasks:
            raise InputError(f"lm-eval has no task {name!r}.{suggest(name, manager.all_tasks)}")
    try:
        found: Mapping[str, Any] = manager.load([name])["tasks"]
    except Exception as error:  # the network's, those of files, and of every task's own code
        raise InputError(f"lm-eval={source} cannot be loaded: {first_line(error)}") from error
    if len(found) != 1:
        raise InputError(
            f"lm-eval={source} is a group of {len(found)} tasks: name them one by one, e.g. "
            f"{', '.join(list(found)[:3])}."
        )
    return next(iter(found.values()))


@cache
def _everything() -> Any:
    """Returns the index of all tasks that the harness has: some ten thousand files, read once."""
    return importlib.import_module("lm_eval.tasks").TaskManager()


def requests_of(task: Any, source: str, items: int, seed: int) -> tuple[tuple[Any, ...], ...]:
    """Returns the requests of each sample; of more than `items` samples they are drawn by `seed`.

    Raises:
        InputError: a task of images or of code to be run, or one that cannot make its requests.
    """
    if getattr(task, "UNSAFE_CODE", False):
        raise InputError(f"lm-eval={source} runs code that a model writes: that is not done here.")
    if getattr(task, "MULTIMODAL", False):
        raise InputError(f"lm-eval={source} has images: expected a task of text.")
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=SHOTS_SEED)
    try:
        chosen = sampled(list(range(len(task.eval_docs))), items, seed)
        task.build_all_requests(samples=chosen)
    except Exception as error:  # of every task's own code
        raise InputError(f"lm-eval={source} makes no requests: {first_line(error)}") from error
    found: dict[int, list[Any]] = {}
    for request in task.instances:
        found.setdefault(request.doc_id, []).append(request)
    return tuple(tuple(sorted(own, key=lambda request: request.idx)) for own in found.values())


def first_line(error: Exception) -> str:
    """Returns the beginning of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the harness's warnings, log and progress bars to itself: the talk is the caller's."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
