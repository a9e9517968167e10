"""The settings of an engine: models, device, drafter, limits. Plain data, checked on construction."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from detgen.declaring import Option
from detgen.drafters.registry import DRAFTERS
from detgen.engine.showing import brief
from detgen.errors import DTypeName, EngineError, KVDtypeName, QuantName

if TYPE_CHECKING:
    from detgen.drafters.protocol import Drafter
    from detgen.models.loaded import LoadedModel

    Source: TypeAlias = str | Path | LoadedModel | None
    Folder: TypeAlias = str | Path | None
    DrafterName: TypeAlias = str | Callable[[Mapping[str, Drafter]], Drafter]
else:
    Source = Folder = DrafterName = Any

# Other names of number formats.
DTYPE_NAMES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}

_UNITS = {"": 1} | {
    letter.lower() + suffix: base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}
_MOST_CHUNKS = 1_000_000_000


def parse_size(text: str) -> int:
    """Parse `4GiB`, `500MB`, `2.5g` (as GiB) or a plain number of bytes.

    Raises:
        ValueError: if it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = match and _UNITS.get("" if match[2] == "b" else match[2])
    size = round(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise ValueError(f"{text!r} is not an amount of memory such as 4GiB, 500MB or 1073741824")
    return size


def _bytes(size: Any) -> Any:
    return parse_size(size) if isinstance(size, str) else size


def _draft_tokens(text: str) -> int | None:
    """Parse a number of tokens, or `auto` as None."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is neither auto nor a whole number of at least 1")
    return int(text)


def _chunks(text: str) -> int | str:
    """Parse a number of chunks, `auto` or `off`."""
    if text in ("auto", "off"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not one of auto, off, CHUNKS (a whole number of at least 1)")
    return int(text)


def _device(text: str) -> str:
    """Parse a device by torch's name, or `auto`."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError(f"{text!r} is not one of auto, cpu, cuda, cuda:N (N a number)")
    return text


def _dtype_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    """Return a parser of number formats by torch's names or short ones."""

    def parse(text: str) -> str:
        name = DTYPE_NAMES.get(text, text)
        if name not in allowed:
            short = (short for short, name in DTYPE_NAMES.items() if name in allowed)
            raise ValueError(f"{text!r} is not one of {', '.join((*allowed, *short))}")
        return name

    return parse


def _drafter(text: str) -> str:
    """Parse the name of a drafter."""
    if text not in DRAFTERS:
        raise ValueError(f"{text!r} is not one of {', '.join(DRAFTERS)}")
    return text


def _switch(text: str) -> bool:
    """Parse `on` or `off`."""
    if text not in ("on", "off"):
        raise ValueError(f"{text!r} is neither on nor off")
    return text == "on"


def _known(drafter: Any) -> Any:
    if not callable(drafter) and drafter not in tuple(DRAFTERS):
        raise EngineError(f"drafter must be one of {', '.join(DRAFTERS)}, got {drafter!r}")
    return drafter


@dataclass(frozen=True, slots=True, repr=False, config=ConfigDict(strict=True, extra="forbid"))
class EngineConfig:
    """How to build an engine. Only `target`, `adapter`, `dtype`, `kv_dtype`, `target_quant` and the device can change
    outputs.

    Attributes:
        target: folder, GGUF file or hub name of the target model, demo-thinking (the embedded one that thinks while it
            reads), or a loaded model (it is changed in place); None is the embedded one.
        draft: the draft model, in the same forms; None is the embedded one if the target is None, too, else none.
        drafter: name of the drafter; auto chooses during the run. Or a function that makes a custom drafter, given
            the engine's own by name: `model` (if there is a draft model), `self` (if the target can), `ngram`, `auto`
            and `none`.
        draft_tokens: draft tokens per round for all drafters but `none`; None adapts.
        batch_size: maximum number of requests at a time.
        device: auto, cpu, cuda or cuda:N.
        dtype: number format of weights; auto is the checkpoint's own. With bfloat16, inputs of linear layers are
            rounded to it, too; everything else is computed in float32. bfloat16-tc25 and bfloat16-tc24 are the same,
            but products are added up as tensor cores of GPUs do.
        kv_dtype: number format of the KV cache, float32 or bfloat16; auto is bfloat16 where `dtype` is one of these.
        adapter: folder of an adapter (LoRA, as PEFT saves it) that is merged into the target's weights; None for none.
        target_quant: quantization of the target's linear layers: q8, q4 or q4_k by detgen, nf4 or int8 by bitsandbytes,
            or none.
        draft_quant: quantization of the draft model, as for `target_quant`.
        threads: CPU threads; None for one per core.
        kv_memory: bytes for the KV caches, or a text such as 4GiB or 500MB, which is converted; None takes a share of
            the free memory.
        prefill_chunk: maximum number of prompt tokens per request and round; None fills the pass.
        prefix_cache: share the KV entries of common prefixes, also with finished requests.
        speculative_prefill: chunks of a prompt to read ahead in a pass, for models that think while they read; auto
            adapts, off reads chunk by chunk.
        trust_remote_code: run Python code that comes with a model.
    """

    target: Annotated[
        Source,
        Field(
            description="The model: a folder, a GGUF file, a Hugging Face name, or demo-thinking, the embedded one that"
            " thinks while it reads."
        ),
        Option("MODEL", "--target --model", default="the embedded one"),
    ] = None
    draft: Annotated[
        Source,
        Field(description="A smaller model with the same vocabulary, to draft tokens. Never changes the text."),
        Option("MODEL", default="the embedded one with the embedded target, else none"),
    ] = None
    drafter: Annotated[
        DrafterName,
        AfterValidator(_known),
        Field(
            description=f"Where drafts come from: {'; '.join(f'{name}: {d.help}' for name, d in DRAFTERS.items())}."
            " Never changes the text."
        ),
        Option("NAME", panel="Speed", parser=_drafter),
    ] = "auto"
    draft_tokens: Annotated[
        int | None,
        Field(ge=1, le=1_000_000, description="Tokens to draft per round; auto adapts."),
        Option("N|auto", panel="Speed", parser=_draft_tokens, default="auto"),
    ] = None
    batch_size: Annotated[
        int,
        Field(ge=1, le=1_000_000, description="Maximum number of requests to run at a time."),
        Option("N", panel="Speed"),
    ] = 16
    device: Annotated[
        str,
        Field(description="Where the models run. No GPU has run detgen yet; a GPU has to pass a self-test first."),
        Option("auto|cpu|cuda|cuda:N", parser=_device),
    ] = "auto"
    dtype: Annotated[
        DTypeName,
        Field(
            description="Number format of weights: float32 (f32), bfloat16 (bf16), float16 (f16) or auto, the"
            " checkpoint's own. With bfloat16, the inputs of linear layers are rounded to it, too, which is faster on"
            " many processors; everything else is computed in float32. bfloat16-tc25 adds products up as the tensor"
            " cores of Hopper and Blackwell do, bfloat16-tc24 as those of Ampere and Ada."
        ),
        Option("TYPE", panel="Model", parser=_dtype_of(get_args(DTypeName)), values=get_args(DTypeName)),
    ] = "auto"
    kv_dtype: Annotated[
        KVDtypeName,
        Field(
            description="Number format of the KV cache: float32 (f32), bfloat16 (bf16), which takes half the memory, or"
            " auto: bfloat16 with --dtype bfloat16 (tc25 and tc24, too), else float32."
        ),
        Option("TYPE", panel="Model", parser=_dtype_of(get_args(KVDtypeName)), values=get_args(KVDtypeName)),
    ] = "auto"
    adapter: Annotated[
        Folder,
        Field(
            description="A LoRA adapter of the model, a folder as PEFT saves it. It is merged into the model's weights"
            " while they are read, before they are quantized."
        ),
        Option("FOLDER", panel="Model", default="none"),
    ] = None
    target_quant: Annotated[
        QuantName,
        Field(
            description="Quantize the target. q8, q4 and q4_k keep weights in groups of 32, q4_k with minima;"
            " nf4 and int8 are bitsandbytes'. All: the same bits on every CPU."
        ),
        Option("none|q8|q4|q4_k|nf4|int8", panel="Model"),
    ] = "none"
    draft_quant: Annotated[
        QuantName,
        Field(description="Quantize the draft model; the same values."),
        Option("none|q8|q4|q4_k|nf4|int8", panel="Model"),
    ] = "none"
    # With far more threads than it can start, a process dies without a message.
    threads: Annotated[
        int | None,
        Field(ge=1, le=1024, description="CPU threads."),
        Option("N", panel="Speed", default="one per core"),
    ] = None
    kv_memory: Annotated[
        int | None,
        Field(ge=1, le=2**50, description="Memory for the KV cache, such as 4GiB, 500MB or a number of bytes."),
        Option("SIZE", panel="Speed", parser=parse_size, default="a share of what is free"),
        BeforeValidator(_bytes),
    ] = None
    prefill_chunk: Annotated[int | None, Field(ge=1, le=_MOST_CHUNKS)] = None
    prefix_cache: Annotated[
        bool,
        Field(
            description="Read a prefix that prompts share only once, and keep it for later prompts. Never changes the"
            " text."
        ),
        Option("on|off", panel="Expert", parser=_switch, default="on"),
    ] = True
    speculative_prefill: Annotated[
        Literal["auto", "off"] | Annotated[int, Field(ge=1, le=_MOST_CHUNKS)],
        Field(
            description="Chunks of a prompt to read ahead, for a model that thinks while it reads, such as"
            " demo-thinking; auto adapts. Never changes the text."
        ),
        Option("auto|off|CHUNKS", panel="Expert", parser=_chunks),
    ] = "auto"
    trust_remote_code: Annotated[
        bool,
        Field(description="Run Python code that comes with a model. It can do whatever you can; read it first."),
        Option(panel="Expert"),
    ] = False

    def __repr__(self) -> str:
        return brief(self)

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, given: Any, check: Callable[[Any], EngineConfig]) -> EngineConfig:
        """Check types and ranges.

        Raises:
            EngineError: if one is wrong; names the setting, its valid values and its value.
            TypeError: if there is no such setting.
        """
        try:
            return check(given)
        except ValidationError as error:
            raise _refusal(error.errors(include_url=False)) from None


def _refusal(errors: Sequence[Mapping[str, Any]]) -> Exception:
    """Return the exception for the first wrong setting; errors of the parts of a union are reported as one."""
    name, value = errors[0]["loc"][0], errors[0]["input"]
    same = [error for error in errors if error["loc"][0] == name]
    if same[0]["type"] == "unexpected_keyword_argument":
        return TypeError(f"there is no engine setting {name!r}")
    if same[0]["type"] == "value_error":
        return EngineError(f"{name}: {same[0]['ctx']['error']}")
    if len(same) == 1 and same[0]["type"] == "less_than_equal":
        return EngineError(f"{name} must be at most {same[0]['ctx']['le']}, got {value!r}")
    return EngineError(f"{name} must be {' or '.join(map(_needed, same))}, got {value!r}")


def _needed(error: Mapping[str, Any]) -> str:
    if error["type"] in ("int_type", "greater_than_equal", "less_than_equal"):
        return "a whole number of at least 1"
    if error["type"] == "literal_error":
        words = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        return words if len(error["loc"]) > 1 else f"one of {words}"
    return "True or False" if error["type"] == "bool_type" else "a string"
