"""A transformers decoder as an OpenVINO model with a cache of its own, as its generation pipelines want it.

The model is traced with its cache as further inputs and outputs, which OpenVINO then turns into variables. Attention
is one scaled_dot_product_attention over cached and new keys, the form that its paged attention takes the place of.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from detgen.bench.model_source import loaded
from detgen.bench.peer_interface import ModelSource

if TYPE_CHECKING:
    import torch

_NAME = "detgen_openvino"


def write_model(source: ModelSource, role: str) -> Path:
    """Convert a model to a folder with `openvino_model.xml`; one that is there already is left as it is.

    Raises:
        ValueError: if the model does not take its attention from transformers' AttentionInterface.
    """
    import openvino
    from openvino._offline_transformations import apply_make_stateful_transformation

    folder = source.scratch / f"openvino-{role}"
    if (folder / "openvino_model.bin").is_file():
        return folder
    found = loaded(source, role)
    model = found.whole().float()  # what OpenVINO computes in is its own choice or the variant's
    exported, caches = _traceable(model)
    converted = openvino.convert_model(exported, example_input=_example(model, caches))
    names = {}
    inputs = ["input_ids", "attention_mask", "position_ids"]
    for i, (port, value) in enumerate(zip(converted.inputs[3:], converted.outputs[1:], strict=True)):
        past, present = f"past_key_values.{i // 2}.{'kv'[i % 2]}", f"present.{i // 2}.{'kv'[i % 2]}"
        heads, size = caches[i // 2]
        port.get_node().set_partial_shape(openvino.PartialShape([-1, heads, -1, size]))
        port.get_tensor().set_names({past})
        value.get_tensor().set_names({present})
        names[past] = present
    for port, name in zip(converted.inputs[:3], inputs, strict=True):
        port.get_node().set_partial_shape(openvino.PartialShape([-1, -1]))
        port.get_tensor().set_names({name})
    converted.outputs[0].get_tensor().set_names({"logits"})
    _reorder_caches(converted)
    converted.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(converted, names)
    _empty_at_first(converted)
    folder.mkdir()
    if model.config.eos_token_id is None:
        model.config.eos_token_id = 0  # its pipelines ask for one, though they are told to ignore it
    model.config.save_pretrained(folder)
    openvino.save_model(converted, folder / "openvino_model.xml", compress_to_fp16=False)
    if source.random_weights is None:
        _write_tokenizer(found.tokenizer, folder)
    return folder


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """The tokenizer beside the model: speculative decoding asks for it, though it is given token ids."""
    import openvino
    from openvino_tokenizers import convert_tokenizer

    for name, converted in zip(
        ("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
    ):
        openvino.save_model(converted, folder / f"openvino_{name}.xml")


def _reorder_caches(converted: Any) -> None:
    """Read each cache through an index of beams: the form in which OpenVINO's pipelines recognise it."""
    import numpy as np
    import openvino
    from openvino import opset13

    beams = opset13.parameter([-1], dtype=np.int32, name="beam_idx")
    beams.output(0).get_tensor().set_names({"beam_idx"})
    caches = converted.inputs[3:]
    converted.add_parameters([beams])
    for port in caches:
        readers = port.get_node().output(0).get_target_inputs()
        read = opset13.gather(port.get_node(), beams, opset13.constant(0, dtype=openvino.Type.i64))
        for reader in readers:
            reader.replace_source_output(read.output(0))


def _empty_at_first(converted: Any) -> None:
    """Give each cache its first value: no keys, for as many sequences as the input has."""
    import numpy as np
    from openvino import opset13

    def numbers(*values: int) -> Any:
        return opset13.constant(np.array(values, dtype=np.int64))

    ids = next(port for port in converted.inputs if "input_ids" in port.get_names())
    batch = opset13.gather(opset13.shape_of(ids, output_type="i64"), numbers(0), numbers(0))
    for node in converted.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, size = node.get_output_partial_shape(0)
            shape = opset13.concat([batch, numbers(heads.get_length(), 0, size.get_length())], axis=0)
            zero = opset13.constant(0.0, dtype=node.get_output_element_type(0))
            node.set_arguments([opset13.broadcast(zero, shape)])
    converted.validate_nodes_and_infer_types()


def _traceable(model: Any) -> tuple[Any, list[tuple[int, int]]]:
    """A module (ids, mask, positions, *caches) -> (logits, *caches), and (heads, head size) of each layer's cache."""
    import torch
    from torch import nn
    from transformers import AttentionInterface

    # What the attention function below reads and writes during a pass.
    state: dict[str, Any] = {}
    seen: dict[int, tuple[int, int]] = {}
    groups: dict[int, int] = {}

    def attention(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        layer: Any = module.layer_idx
        if layer not in seen:  # before tracing, where shapes are numbers
            seen[layer] = key.shape[1], key.shape[3]
            groups[layer] = query.shape[1] // key.shape[1]
        if state["past"]:
            key = torch.cat([state["past"][2 * layer], key], dim=2)
            value = torch.cat([state["past"][2 * layer + 1], value], dim=2)
        state["present"] += [key, value]
        if groups[layer] > 1:
            key, value = (_repeat(x, seen[layer][0], groups[layer]) for x in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=state["mask"], scale=options.get("scaling")
        )
        return mixed.transpose(1, 2), None

    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, *past: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            keys = torch.cumsum(torch.ones_like(attention_mask), dim=1) - 1
            visible = (keys[:, None, :] <= position_ids[:, :, None]) & (attention_mask[:, None, :] > 0)
            zero = torch.zeros([], dtype=torch.float32)
            state["mask"] = torch.where(visible, zero, torch.full_like(zero, -3e38))[:, None]
            state["past"], state["present"] = past, []
            logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            return logits, *state["present"]

    AttentionInterface.register(_NAME, attention)
    model.set_attn_implementation(_NAME)
    exported = Exported().eval()
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with torch.inference_mode():
        exported(ids, torch.ones_like(ids), torch.arange(2)[None])
    if len(seen) != model.config.num_hidden_layers:
        raise ValueError(f"{type(model).__name__} does not take its attention from transformers' AttentionInterface")
    return exported, [seen[i] for i in sorted(seen)]


def _repeat(x: torch.Tensor, heads: int, group: int) -> torch.Tensor:
    """[batch, heads, keys, size] -> [batch, heads * group, keys, size], each head `group` times in a row."""
    batch, _, keys, size = x.shape
    return x[:, :, None].expand(batch, heads, group, keys, size).reshape(batch, heads * group, keys, size)


def _example(model: Any, caches: list[tuple[int, int]]) -> tuple[Any, ...]:
    """Inputs for tracing: two sequences of three tokens after four cached ones."""
    import torch

    ids = torch.zeros(2, 3, dtype=torch.int64)
    past = [torch.zeros(2, heads, 4, size) for heads, size in caches for _ in "kv"]
    return ids, torch.ones(2, 7, dtype=torch.int64), torch.arange(4, 7).repeat(2, 1), *past
