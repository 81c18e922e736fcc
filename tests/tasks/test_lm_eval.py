"""lm-eval's tasks through our task and model, against its own HFLM; all data are local files."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.calib_sets import TokenBatch
from quantkit.errors import InputError, ProbeError
from quantkit.jobs.tasks import LmEvalSpec
from quantkit.tasks import harness_tasks
from quantkit.tasks.lm_eval_harness import LmEval

MULTIPLE_CHOICE = """
output_type: multiple_choice
doc_to_text: "{{ctx}}"
doc_to_choice: "{{endings}}"
doc_to_target: label
num_fewshot: 1
metric_list:
  - metric: acc
  - metric: acc_norm
  - metric: acc_bytes
  - metric: mcc
"""
CHOICE_HEAD = MULTIPLE_CHOICE[: MULTIPLE_CHOICE.index("metric_list")]
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
LAST_WORD = """
output_type: loglikelihood
doc_to_text: "{{ctx}}"
doc_to_target: " {{word}}"
metric_list:
  - metric: perplexity
  - metric: acc
"""
GENERATE = """
output_type: generate_until
doc_to_text: "{{ctx}}"
doc_to_target: "{{word}}"
generation_kwargs:
  until: [%s]
  max_gen_toks: 7
  do_sample: false
metric_list:
  - metric: exact_match
"""
WORDS = ["red", "one", "a blue thing", "nothing at all", "é", "seven and a half"]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and no cache but in the test's own folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = importlib.import_module("datasets.config")
        importlib.import_module("lm_eval.evaluator")
        importlib.import_module("lm_eval.models.huggingface")
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(config, "HF_DATASETS_OFFLINE", True)


def yaml_of(folder: Path, body: str, rows: list[dict[str, Any]], name: str = "local_task") -> Path:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    head = f"""task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
fewshot_split: test
"""
    path = folder / f"{name}.yaml"
    path.write_text(head + body)
    return path


def choices(count: int = 9) -> list[dict[str, Any]]:
    return [
        {"ctx": f"Question {i}: what is it?", "label": i % 3, "endings": WORDS[i % 3 : i % 3 + 4]}
        for i in range(count)
    ]


def continued(count: int = 5) -> list[dict[str, Any]]:
    return [
        {
            "ctx": f"In {'very ' * i}short, it is",
            "word": WORDS[i],
            "text": f"{WORDS[i]}. " * (3 + i),
        }
        for i in range(count)
    ]


def forward_of(model: Any) -> Any:
    def forward(batch: TokenBatch, positions: torch.Tensor) -> torch.Tensor:
        return model(**batch.inputs, use_cache=False).logits[:, positions]

    return forward


def task_of(path: Path | str, tokenizer: Any, **options: Any) -> LmEval:
    return LmEval.of(LmEvalSpec(source=str(path)), tokenizer, **options)


def scores_of(task: LmEval, forward: Any) -> dict[str, Any]:
    """Returns every metric, by name, and details."""
    rows = {}
    for batch in task.batches:
        rows.update(zip(batch, task.run(forward, batch), strict=True))
    scores = task.scores(np.array([rows[index] for index in range(len(rows))]))
    return {metric.name: metric for metric in scores.metrics} | dict(scores.details)


def theirs(path: Path, model: Any) -> dict[str, Any]:
    """Returns what the harness finds with a model of its own kind."""
    evaluator = importlib.import_module("lm_eval.evaluator")
    tasks = importlib.import_module("lm_eval.tasks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = tasks.TaskManager(include_path=str(path.parent), include_defaults=False)
        found: dict[str, Any] = evaluator.simple_evaluate(
            model, tasks=[path.stem], task_manager=manager, bootstrap_iters=0, log_samples=True
        )
    return found


def hflm(model: Any, tokenizer: Any, **options: Any) -> Any:
    module = importlib.import_module("lm_eval.models.huggingface")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module.HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", **options)


def ours(model: Any, tokenizer: Any, **options: Any) -> Any:
    module = importlib.import_module("quantkit.tasks.harness_model")
    return module.HarnessModel(forward_of(model), module.Encoder(tokenizer, **options))


@pytest.fixture
def sharp_llama(tiny_llama: Any) -> Any:
    """The tiny Llama with opinions: its likelihoods differ by many nats."""
    with torch.no_grad():
        tiny_llama.lm_head.weight.mul_(30)
    return tiny_llama


@pytest.fixture(params=["plain", "BOS"])
def either_tokenizer(request: Any, tokenizer: Any, bos_tokenizer: Any) -> Any:
    chosen = tokenizer if request.param == "plain" else bos_tokenizer
    # HFLM pads with it, on the left too
    chosen.pad_token = chosen.eos_token = "<s>"
    return chosen


def test_multiple_choice_is_as_hflm_finds_it_at_every_batch_size(
    tmp_path: Path, sharp_llama: Any, either_tokenizer: Any
) -> None:
    path = yaml_of(tmp_path, MULTIPLE_CHOICE, choices())
    expected = theirs(path, hflm(sharp_llama, either_tokenizer))
    samples = expected["samples"]["local_task"]
    tasks = [task_of(path, either_tokenizer, batch_size=size) for size in (1, 8)]
    one, found = (scores_of(task, forward_of(sharp_llama)) for task in tasks)
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert one[name].total.tolist() == found[name].total.tolist()
        assert found[name].value == expected["results"]["local_task"][f"{name},none"]
        assert found[name].total.tolist() == [sample[name] for sample in samples]
        assert (found[name].chance, found[name].trials) == (0.25, True)
        assert found[name].is_share
    assert found["mcc"] == pytest.approx(expected["results"]["local_task"]["mcc,none"])
    # the model is neither always right nor always wrong, so that the test can fail
    assert 0 < found["acc"].value < 1


def test_rolling_windows_are_as_hflm_finds_them(
    tmp_path: Path, sharp_llama: Any, either_tokenizer: Any
) -> None:
    path = yaml_of(tmp_path, ROLLING, continued())
    # the longest text has more than 90 tokens
    task = task_of(path, either_tokenizer, max_length=20, bos="never")
    found = scores_of(task, forward_of(sharp_llama))
    options = {"max_length": 20, "add_bos_token": False}
    expected = theirs(path, hflm(sharp_llama, either_tokenizer, **options))
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        value = expected["results"]["local_task"][f"{name},none"]
        assert found[name].value == pytest.approx(value, rel=1e-5)
        assert not found[name].higher_is_better and found[name].chance is None
        assert not found[name].is_share
    assert task.data.seq_len == 20


def test_perplexity_of_last_words_is_as_hflm_finds_it(
    tmp_path: Path, tiny_llama: Any, either_tokenizer: Any
) -> None:
    path = yaml_of(tmp_path, LAST_WORD, continued())
    found = scores_of(task_of(path, either_tokenizer), forward_of(tiny_llama))
    expected = theirs(path, hflm(tiny_llama, either_tokenizer))["results"]["local_task"]
    assert found["perplexity"].value == pytest.approx(expected["perplexity,none"], rel=1e-5)
    assert found["perplexity"].link == "exp" and not found["perplexity"].higher_is_better
    assert found["acc"].value == expected["acc,none"]
    assert found["acc"].is_share and not found["perplexity"].is_share


def test_generated_text_is_as_hflm_writes_it(
    tmp_path: Path, sharp_llama: Any, either_tokenizer: Any
) -> None:
    path = yaml_of(tmp_path, GENERATE % "never", continued())
    reference = hflm(sharp_llama, either_tokenizer)
    texts = [s["resps"][0][0] for s in theirs(path, reference)["samples"]["local_task"]]
    assert len(set(texts)) > 1
    mine = theirs(path, ours(sharp_llama, either_tokenizer))["samples"]["local_task"]
    assert [sample["resps"][0][0] for sample in mine] == texts
    # ends where a text says so: at something that the second one has in its middle
    stop = texts[1][2]
    rows = [
        row | {"word": text.split(stop)[0]} for row, text in zip(continued(), texts, strict=True)
    ]
    rows[4]["word"] = "not this"
    path = yaml_of(tmp_path, GENERATE % json.dumps(stop), rows, name="stopped")
    task = task_of(path, either_tokenizer, batch_size=3)
    exact = scores_of(task, forward_of(sharp_llama))["exact_match"]
    assert exact.total.tolist() == [1, 1, 1, 1, 0]
    assert exact.chance is None and exact.is_share


def test_chance_is_of_the_choices_where_requests_are_twice_as_many(
    tmp_path: Path, sharp_llama: Any, either_tokenizer: Any
) -> None:
    """Mutual information asks for every choice without its context, too."""
    rows = choices()
    rows[0]["endings"] = WORDS[:2]
    metrics = "metric_list:\n  - metric: acc\n  - metric: acc_mutual_info\n"
    path = yaml_of(tmp_path, CHOICE_HEAD + metrics, rows)
    task = task_of(path, either_tokenizer)
    assert [len(own) for own in task.requests] == [4] + 8 * [8]
    found = scores_of(task, forward_of(sharp_llama))
    expected = theirs(path, hflm(sharp_llama, either_tokenizer))["results"]["local_task"]
    for name in ("acc", "acc_mutual_info"):
        assert found[name].value == expected[f"{name},none"]
        assert found[name].chance == pytest.approx((1 / 2 + 8 / 4) / 9)
        assert found[name].trials and found[name].is_share


def test_of_several_right_choices_each_will_do(
    tmp_path: Path, sharp_llama: Any, tokenizer: Any
) -> None:
    rows = [row | {"label": [0, 2] if i % 2 else [i % 4]} for i, row in enumerate(choices(8))]
    head = CHOICE_HEAD.replace("num_fewshot: 1", "num_fewshot: 0")
    path = yaml_of(tmp_path, head + "metric_list:\n  - metric: acc\n", rows)
    found = scores_of(task_of(path, tokenizer), forward_of(sharp_llama))
    assert found["acc"].chance == pytest.approx((1 / 4 + 2 / 4) / 2)


def test_values_between_0_and_1_are_no_trials(
    tmp_path: Path, sharp_llama: Any, tokenizer: Any
) -> None:
    """A task's own function may give half a point."""
    code = """
def half(doc, results):
    return {"acc": doc["label"] / 2, "acc_norm": doc["label"] % 2}
"""
    (tmp_path / "own.py").write_text(code)
    names = ("acc", "acc_norm")
    metrics = "metric_list:\n" + "".join(f"  - metric: {name}\n" for name in names)
    body = f"{CHOICE_HEAD}process_results: !function own.half\n{metrics}"
    task = task_of(yaml_of(tmp_path, body, choices()), tokenizer)
    found = scores_of(task, forward_of(sharp_llama))
    assert found["acc"].total.tolist() == [i % 3 / 2 for i in range(9)]
    assert [(found[name].trials, found[name].is_share) for name in names] == [
        (False, False),
        (True, True),
    ]
    assert found["acc"].chance == found["acc_norm"].chance == 0.25


def test_a_function_of_the_task_that_fails_is_named(
    tmp_path: Path, sharp_llama: Any, tokenizer: Any
) -> None:
    (tmp_path / "own.py").write_text("def lost(doc, results):\n    return doc['nothing']\n")
    body = f"{CHOICE_HEAD}process_results: !function own.lost\nmetric_list:\n  - metric: acc\n"
    task = task_of(yaml_of(tmp_path, body, choices()), tokenizer)
    with pytest.raises(InputError, match=r"cannot score sample 0 \(KeyError: 'nothing'\)"):
        scores_of(task, forward_of(sharp_llama))


def test_an_aggregation_without_a_name_is_no_mean(
    tmp_path: Path, sharp_llama: Any, tokenizer: Any
) -> None:
    code = """
from functools import partial

def times(values, *, factor):
    return factor * sum(values)

points = partial(times, factor=7)
"""
    (tmp_path / "own.py").write_text(code)
    metrics = """metric_list:
  - metric: acc_norm
  - metric: acc
    aggregation: !function own.points
    higher_is_better: true
"""
    path = yaml_of(tmp_path, CHOICE_HEAD + metrics, choices())
    found = scores_of(task_of(path, tokenizer), forward_of(sharp_llama))
    expected = theirs(path, hflm(sharp_llama, tokenizer))
    right = sum(sample["acc"] for sample in expected["samples"]["local_task"])
    assert right >= 1
    assert found["acc"] == expected["results"]["local_task"]["acc,none"] == 7 * right
    assert found["acc_norm"].value == expected["results"]["local_task"]["acc_norm,none"]


@pytest.mark.parametrize(
    ("body", "rows", "mark"),
    [
        (MULTIPLE_CHOICE.replace("fewshot: 1", "fewshot: 0"), choices(), "Question 1:"),
        (ROLLING, continued(), "one. one. "),
        (GENERATE % "never", continued(), "In very short"),
    ],
    ids=["multiple choice", "rolling", "generated"],
)
def test_a_sample_that_the_model_says_no_numbers_of_is_nan(
    tmp_path: Path,
    sharp_llama: Any,
    tokenizer: Any,
    body: str,
    rows: list[dict[str, Any]],
    mark: str,
) -> None:
    """One logit of another token, in the second sample only."""
    task = task_of(yaml_of(tmp_path, body, rows), tokenizer, batch_size=2)

    def forward(batch: TokenBatch, positions: torch.Tensor) -> torch.Tensor:
        logits = forward_of(sharp_llama)(batch, positions)
        for row, text in enumerate(tokenizer.batch_decode(batch.input_ids)):
            if mark in text:
                logits[row, :, 3] = float("nan")
        return logits

    items = range(len(rows))
    plain = task.run(forward_of(sharp_llama), items)
    spoilt = task.run(forward, items)
    assert np.isfinite(plain).all()
    assert [bool(np.isnan(row).any()) for row in spoilt] == [index == 1 for index in items]
    others = [index for index in items if index != 1]
    np.testing.assert_array_equal(spoilt[others], plain[others])


def test_text_that_the_model_cannot_write_is_an_error(tiny_llama: Any, tokenizer: Any) -> None:
    def forward(batch: TokenBatch, positions: torch.Tensor) -> torch.Tensor:
        logits = forward_of(tiny_llama)(batch, positions)
        long = batch.attention_mask.sum(1) > 12
        return torch.where(long[:, None, None], torch.nan, logits)

    module = importlib.import_module("quantkit.tasks.harness_model")
    instance = importlib.import_module("lm_eval.api.instance").Instance
    model = module.HarnessModel(forward, module.Encoder(tokenizer))
    requests = [
        instance("generate_until", {}, (text, {"max_gen_toks": 4}), 0)
        for text in ("short", "a long one of many bytes")
    ]
    (text,) = model.generate_until(requests[:1])
    assert text
    with pytest.raises(ProbeError, match="after 'a long one of many bytes' the model computes NaN"):
        model.generate_until(requests)


def test_our_model_serves_the_harness_itself(
    tmp_path: Path, sharp_llama: Any, bos_tokenizer: Any
) -> None:
    path = yaml_of(tmp_path, MULTIPLE_CHOICE, choices())
    found = [
        theirs(path, model)["results"]["local_task"]
        for model in (ours(sharp_llama, bos_tokenizer), hflm(sharp_llama, bos_tokenizer))
    ]
    for name in ("acc,none", "acc_norm,none", "mcc,none"):
        assert found[0][name] == found[1][name]


def test_of_more_samples_some_are_drawn(tmp_path: Path, tokenizer: Any) -> None:
    path = yaml_of(tmp_path, MULTIPLE_CHOICE, choices(40))
    asked = [own[0].doc["ctx"] for own in task_of(path, tokenizer, items=8, seed=3).requests]
    again = [own[0].doc["ctx"] for own in task_of(path, tokenizer, items=8, seed=3).requests]
    other = [own[0].doc["ctx"] for own in task_of(path, tokenizer, items=8, seed=4).requests]
    everything = [row["ctx"] for row in choices(40)]
    places = [everything.index(ctx) for ctx in asked]
    assert asked == again != other
    assert len(places) == 8 and places == sorted(places) and places != list(range(8))


def test_what_a_task_says_of_itself(tmp_path: Path, tokenizer: Any, bos_tokenizer: Any) -> None:
    path = yaml_of(tmp_path, MULTIPLE_CHOICE, choices())
    task = task_of(path, tokenizer, batch_size=8)
    assert (task.name, task.unit) == (f"lm-eval={path}", "samples")
    assert sorted(index for batch in task.batches for index in batch) == list(range(9))
    assert {len(batch) for batch in task.batches} == {1, 2}
    assert task.data.source == str(path) and task.data.sequences == 9
    assert len(set(task.item_hashes)) == 9
    other = task_of(path, bos_tokenizer, max_length=60)
    assert other.item_hashes == task.item_hashes
    assert other.data.warnings == [
        "26 of 36 contexts are cut at the left: the model takes no more."
    ]


def test_nothing_is_printed_or_warned_of(
    tmp_path: Path, tiny_llama: Any, tokenizer: Any, capfd: Any, recwarn: Any
) -> None:
    path = yaml_of(tmp_path, MULTIPLE_CHOICE, choices())
    task = task_of(path, tokenizer)
    scores_of(task, forward_of(tiny_llama))
    assert tuple(capfd.readouterr()) == ("", "")
    assert not recwarn.list


def test_a_missing_harness_is_one_error(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(InputError, match=r"pip install 'quantkit\[data\]'"):
        task_of("hellaswag", tokenizer)


def test_a_task_is_found_by_its_name_and_another_suggested(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = yaml_of(tmp_path, MULTIPLE_CHOICE, choices())
    tasks = importlib.import_module("lm_eval.tasks")
    # the harness's own index takes half a minute
    small = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(harness_tasks, "_everything", lambda: small)
    named = task_of("local_task", tokenizer)
    assert named.name == "lm-eval=local_task"
    assert named.item_hashes == task_of(path, tokenizer).item_hashes
    with pytest.raises(InputError, match=r"no task 'local_tsk'\. Did you mean 'local_task'\?"):
        task_of("local_tsk", tokenizer)


@pytest.mark.parametrize(
    ("body", "rows", "said"),
    [
        (GENERATE.replace("false", "true") % "x", continued(), "samples its text"),
        (
            MULTIPLE_CHOICE.replace("{{endings}}", "{{nowhere}}"),
            choices(),
            "'nowhere' is undefined",
        ),
        (MULTIPLE_CHOICE, [*choices(), {"ctx": "a", "label": 0}], "makes no requests"),
        ("output_type: multiple_choice\n", [], "cannot be loaded"),
    ],
    ids=["sampled text", "no such field", "a row without a field", "no data"],
)
def test_a_task_that_cannot_be_scored_is_one_error(
    tmp_path: Path, tokenizer: Any, body: str, rows: list[dict[str, Any]], said: str
) -> None:
    path = yaml_of(tmp_path, body, rows)
    with pytest.raises(InputError, match=said) as error:
        task_of(path, tokenizer)
    assert "\n" not in str(error.value)


def test_files_that_are_no_task_are_errors(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="no such file"):
        task_of(tmp_path / "none.yaml", tokenizer)
    (tmp_path / "other.yaml").write_text("answer: 42\n")
    with pytest.raises(InputError, match="expected a task of lm-eval"):
        task_of(tmp_path / "other.yaml", tokenizer)
    with pytest.raises(InputError, match="no tokenizer"):
        task_of(tmp_path / "other.yaml", None)


def test_a_task_with_no_mean_over_samples_is_an_error(
    tmp_path: Path, tiny_llama: Any, tokenizer: Any
) -> None:
    body = MULTIPLE_CHOICE[: MULTIPLE_CHOICE.index("  - metric: acc\n")] + "  - metric: mcc\n"
    task = task_of(yaml_of(tmp_path, body, choices()), tokenizer)
    with pytest.raises(InputError, match="none of its metrics is a mean over samples"):
        scores_of(task, forward_of(tiny_llama))
