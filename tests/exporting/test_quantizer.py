"""The quantizer inside transformers' export: grids of `quantkit export`, ranges of the graph."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.exporters.configs import ExportFormat, OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

import quantkit
from quantkit.errors import InputError
from quantkit.exporting import QuantkitQuantizer, load_graph, quantize_graph, save_graph
from quantkit.jobs import ExportFormat as Format
from quantkit.quantization import fake_quantized
from quantkit.recipe import Recipe
from tests.exporting.conftest import Exported, seen_ranges

NEW_TOKENS = 6


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter warns about its own insides."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def samples_of(case: Exported) -> list[dict[str, Tensor]]:
    return [
        {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
        for batch in case.batches
    ]


def quantized(case: Exported, quantizer: QuantkitQuantizer) -> ir.Model:
    """Returns what transformers' exporter would return for the graph of a case."""
    with quiet():
        return quantizer.quantize(load_graph(case.path), samples_of(case)[0], ExportFormat.ONNX)


def numbers(model: ir.Model) -> dict[str, bytes]:
    return {
        str(name): value.const_value.numpy().tobytes()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }


def operators(model: ir.Model) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in model.graph]


@pytest.mark.parametrize(
    "recipe", ["w8a8", "w8a8-dynamic", "w4a16", "w8a16-block", "w8a8+logits6:head:static"]
)
def test_grids_are_those_of_the_torch_path(
    exported: Callable[[str], Exported], recipe: str
) -> None:
    case, form = exported("llama"), Format.parse(recipe)

    got = quantized(case, QuantkitQuantizer(recipe, ranges=case.ranges))

    wanted, _ = quantize_graph(
        case.path,
        module_linears=case.linears,
        recipe=form.recipe,
        ranges=case.ranges,
        storage=form.storage,
    )
    assert numbers(got) == numbers(wanted)
    assert operators(got) == operators(wanted)


@pytest.mark.parametrize("kind", ["llama", "diff"])
def test_ranges_are_those_that_torch_sees_without_padding_and_masks(
    exported: Callable[[str], Exported], kind: str
) -> None:
    case = exported(kind)
    quantizer = QuantkitQuantizer("w8a8+logits8:head:static", calibration_dataset=samples_of(case))

    got = quantized(case, quantizer)

    # The graph's map 1 has the heads of all maps, in torch's order.
    wanted = dict(case.ranges)
    for layer in range(2):
        maps = [r for n, r in wanted.items() if n.startswith(f"attention_logit/{layer}/map")]
        heads = [np.maximum(np.abs(r.lo), np.abs(r.hi)) for r in maps]
        scale = got.graph.initializers[f"attention_logit/{layer}/scale"].const_value
        assert scale is not None
        np.testing.assert_allclose(scale.numpy(), np.concatenate(heads) / 127, rtol=1e-5)
    for module in case.linears:
        name = f"linear_input/{module}/scale"
        if name not in got.graph.initializers:
            continue  # it shares the grid of another layer
        seen, scale = wanted[f"linear_input/{module}"], got.graph.initializers[name].const_value
        assert scale is not None
        assert isinstance(seen.lo, float) and isinstance(seen.hi, float)
        span = max(seen.hi, 0.0) - min(seen.lo, 0.0)
        np.testing.assert_allclose(scale.numpy(), span / 255, rtol=1e-5)


def test_a_method_that_clips_gives_narrower_ranges(exported: Callable[[str], Exported]) -> None:
    case = exported("llama")
    scales = {}
    for method in ("minmax", "upper-percentile:99"):
        quantizer = QuantkitQuantizer("w8a8", calibration_dataset=samples_of(case), method=method)
        found = quantized(case, quantizer).graph.initializers
        scales[method] = {
            name: float(value.const_value.numpy())
            for name, value in found.items()
            if name and name.startswith("linear_input") and name.endswith("/scale")
            if value.const_value is not None
        }

    assert scales["minmax"].keys() == scales["upper-percentile:99"].keys()
    assert all(scales["upper-percentile:99"][n] < scale for n, scale in scales["minmax"].items())


def test_without_samples_the_exports_own_inputs_are_seen(
    exported: Callable[[str], Exported],
) -> None:
    case = exported("llama")

    alone = quantized(case, QuantkitQuantizer("w8a8"))

    first = quantized(case, QuantkitQuantizer("w8a8", calibration_dataset=samples_of(case)[:1]))
    both = quantized(case, QuantkitQuantizer("w8a8", calibration_dataset=samples_of(case)))
    assert numbers(alone) == numbers(first) != numbers(both)


def test_samples_may_come_from_a_generator(exported: Callable[[str], Exported]) -> None:
    case = exported("llama")
    samples = samples_of(case)

    got = quantized(case, QuantkitQuantizer("w8a8", calibration_dataset=iter(samples)))

    again = quantized(case, QuantkitQuantizer("w8a8", calibration_dataset=samples))
    assert numbers(got) == numbers(again)


def test_the_same_graph_gives_the_same_bytes(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    case, written = exported("llama"), []
    for name in ("one", "two"):
        quantizer = QuantkitQuantizer("w8a8", calibration_dataset=samples_of(case))
        path = save_graph(quantized(case, quantizer), tmp_path / name)
        written.append((path.read_bytes(), Path(f"{path}.data").read_bytes()))

    assert written[0] == written[1]


def test_the_head_and_what_is_kept_stay_in_float(exported: Callable[[str], Exported]) -> None:
    case, layer = exported("llama"), "model.layers.1.mlp.down_proj"

    got = quantized(
        case, QuantkitQuantizer("w8a8", ranges=case.ranges, keep=(f"linear_input/{layer}",))
    )

    producers = {str(v.name): node for node in got.graph for v in node.outputs}
    head = producers["logits"]
    assert head.op_type == "MatMul"
    assert all(
        value is not None
        and (value.producer() is None or "Dequantize" not in value.producer().op_type)
        for value in head.inputs
    )
    names = {node.name for node in got.graph}
    assert f"weight/{layer}/dequantize" in names
    assert f"linear_input/{layer}/dequantize" not in names
    assert got.metadata_props["quantkit.recipe"] == "w8a8"
    assert got.metadata_props["quantkit.quantizers"] == "27"  # 14 layers, one input in float


@pytest.mark.parametrize(
    ("recipe", "domains"), [("w4a16", {""}), ("w8a16-block", {"", "com.microsoft"})]
)
def test_domains_are_those_of_the_storage(
    exported: Callable[[str], Exported], recipe: str, domains: set[str]
) -> None:
    case = exported("llama")

    got = quantized(case, QuantkitQuantizer(recipe, ranges=case.ranges))

    assert {domain.replace("ai.onnx", "") for domain, _ in operators(got)} == domains


def test_half_precision_by_its_name(exported: Callable[[str], Exported]) -> None:
    case = exported("llama")

    got = quantized(case, QuantkitQuantizer("16"))

    types = {value.dtype for value in got.graph.initializers.values()}
    assert ir.DataType.FLOAT16 in types
    assert got.metadata_props["quantkit.recipe"] == "16"


def test_generation_through_transformers_runner_is_that_of_the_simulation() -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 128, (2, 9))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, :2] = 0
    quantizer = QuantkitQuantizer("w8a8", calibration_dataset=[inputs])
    with quiet():
        export = OnnxExporter().export_for_generation(  # type: ignore[no-untyped-call]
            model,
            inputs,
            config=OnnxConfig(dynamic=True, opset_version=21, quantizer=quantizer),
            multi_token_decode=True,
        )
        tokens = greedy(export.runners, inputs)

    assert set(export.components) == {"prefill", "decode"}
    for component in export.components.values():
        assert component.program.metadata_props["quantkit.quantizers"] == "14"
    # The prompt's graph was calibrated on the prompt, so its simulation has the same ranges.
    ranges = seen_ranges(model, [batch_of(inputs)])
    with fake_quantized(model, Recipe.parse("w8a8"), ranges), torch.no_grad():
        first = model(**inputs).logits[:, -1].argmax(-1)
    assert torch.equal(tokens[:, 0], first)
    with torch.no_grad():
        wanted = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
        )[:, 9:]
    assert (tokens == wanted).float().mean() > 0.5  # chance: 1/128


def batch_of(inputs: dict[str, Tensor]) -> Any:
    from tests.exporting.conftest import TokenBatch

    return TokenBatch(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"].bool())


def greedy(runners: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Returns the tokens that the two graphs generate, `[batch, NEW_TOKENS]`."""
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    out = runners["prefill"](
        input_ids=inputs["input_ids"],
        attention_mask=mask,
        position_ids=positions,
        cache=DynamicCache(),
    )
    tokens: list[Tensor] = []
    while True:
        tokens.append(out.logits[:, -1].argmax(-1))
        if len(tokens) == NEW_TOKENS:
            return torch.stack(tokens, 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        positions = positions[:, -1:] + 1
        out = runners["decode"](
            input_ids=tokens[-1][:, None],
            attention_mask=mask,
            position_ids=positions,
            cache=out.cache,
        )


def test_an_encoder_keeps_its_hidden_states() -> None:
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            initializer_range=0.15,
        )
    ).eval()
    ids = torch.randint(0, 128, (3, 11))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, 7:] = 0
    quantizer = QuantkitQuantizer("w8a8", calibration_dataset=[inputs], attention_bits=8)
    with quiet():
        export = OnnxExporter().export(  # type: ignore[no-untyped-call]
            model, dict(inputs), OnnxConfig(dynamic=True, opset_version=21, quantizer=quantizer)
        )
        got = export(**inputs).last_hidden_state

    with torch.no_grad():
        wanted = model(**inputs).last_hidden_state
    real = inputs["attention_mask"].bool()
    assert torch.cosine_similarity(got[real], wanted[real], dim=-1).min() > 0.995
    assert not torch.equal(got, wanted)
    names = {node.name for node in export.program.graph}
    assert "weight/encoder.layer.1.attention.self.query/dequantize" in names
    assert "linear_input/pooler.dense/dequantize" in names
    assert "attention_logit/1/quantize" in names


def test_layers_that_share_a_weight_share_its_integers() -> None:
    model = AlbertModel(
        AlbertConfig(
            vocab_size=128,
            embedding_size=16,
            hidden_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=400,
        )
    ).eval()
    ids = torch.arange(14).reshape(2, 7)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, 5:] = 0
    quantizer = QuantkitQuantizer("w8a8-dynamic")
    with quiet():
        program = (
            OnnxExporter()  # type: ignore[no-untyped-call]
            .export(model, inputs, OnnxConfig(dynamic=True, quantizer=quantizer))
            .program
        )

    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    stored = [
        value.const_value.nbytes
        for value in program.graph.initializers.values()
        if value.dtype == ir.DataType.INT8 and value.shape is not None and len(value.shape) == 2
    ]
    assert sum(stored) == sum(weight.numel() for weight in weights)
    # 6 layers in each of 3 rounds, the mapping into them and the pooler; weights and inputs.
    assert program.metadata_props["quantkit.quantizers"] == str(2 * (3 * 6 + 2))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"recipe": "w9x"}, "w9x"),
        ({"recipe": "auto"}, "quantkit export MODEL --quantize auto"),
        ({"recipe": "w8a8+kv8:static"}, "quantkit export MODEL"),
        ({"recipe": "w8a8", "storage": "matmulnbits"}, "weights by group"),
        ({"recipe": "w8a8", "method": "moving-average"}, "order of the samples"),
        ({"recipe": "w8a8", "method": "minimax"}, "minmax"),
        ({"recipe": "16", "attention_bits": 8}, "half precision"),
        ({"recipe": "w8a8+logits8", "keep": ("attention_logit/foo",)}, "attention_logit/0/map 1"),
        ({"recipe": "w8a8+logits8", "keep": ("attention_logit/0",)}, "attention_logit/0/map 1"),
    ],
    ids=lambda x: " ".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_what_cannot_be_asked_for(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        QuantkitQuantizer(**arguments)


def with_opset(model: ir.Model, opset: int) -> ir.Model:
    model.graph.opset_imports[""] = opset
    return model


def with_node(model: ir.Model) -> ir.Model:
    last = model.graph[-1]
    model.graph.append(ir.node("DynamicQuantizeLinear", [last.outputs[0]], num_outputs=3, name="q"))
    return model


def with_half_weight(model: ir.Model) -> ir.Model:
    node = next(node for node in model.graph if node.op_type == "MatMul" and "linear" in node.name)
    weight = node.inputs[1]
    assert weight is not None
    weight.dtype = ir.DataType.FLOAT16
    return model


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (lambda m: with_opset(m, 20), {"recipe": "w4a16"}, "needs opset 21, the graph has 20"),
        (lambda m: with_opset(m, 17), {"recipe": "w8a8-dynamic"}, "needs opset 18"),
        (with_node, {"recipe": "w8a8-dynamic"}, "quantized already: node 'q'"),
        (with_half_weight, {"recipe": "w8a8-dynamic"}, "expected a float32 graph"),
        (None, {"recipe": "w8a8", "calibration_dataset": []}, "has no samples"),
        (None, {"recipe": "w8a8", "keep": ("weight/model.layers.0.mlp.up",)}, "up_proj"),
        (None, {"recipe": "w8a8", "ranges": {}}, "linear_input/model.layers.0"),
        (
            None,
            {"recipe": "w8a8", "calibration_dataset": [{"input": torch.zeros(1)}]},
            "lacks input 'input_ids'",
        ),
    ],
    ids=[
        "old opset",
        "very old opset",
        "on a grid",
        "half",
        "no samples",
        "keep",
        "range",
        "input",
    ],
)
def test_what_a_graph_cannot_become(
    exported: Callable[[str], Exported],
    change: Callable[[ir.Model], ir.Model] | None,
    arguments: dict[str, Any],
    said: str,
) -> None:
    case = exported("llama")
    model = load_graph(case.path)
    model = model if change is None else change(model)

    with quiet(), pytest.raises(InputError, match=said):
        QuantkitQuantizer(**arguments).quantize(model, samples_of(case)[0], ExportFormat.ONNX)


def test_the_float_graph_is_left_alone(exported: Callable[[str], Exported]) -> None:
    case = exported("llama")
    model = load_graph(case.path)
    before = ir.to_proto(model).SerializeToString(deterministic=True)

    with quiet():
        QuantkitQuantizer("w8a8+logits8:head:static").quantize(
            model, samples_of(case)[0], ExportFormat.ONNX
        )

    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_it_has_a_public_name() -> None:
    assert quantkit.QuantkitQuantizer is QuantkitQuantizer
