"""The keys and types of a manifest, declared once for the run that writes it and everything that reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, NotRequired, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from detgen.drafters.registry import DRAFTERS
from detgen.engine.stats import DrafterStats
from detgen.errors import QuantName
from detgen.params import PARAMETERS

STATUSES = ("running", "interrupted", "finished")
FILES = ("outputs.jsonl", "acceptance.jsonl")
LOGS = {"jsonl": FILES[1], "zst": f"{FILES[1]}.zst", "off": None}  # the file of the acceptance log, by format
RESULTS = "results.jsonl"  # if results were asked for

_declared = with_config(ConfigDict(extra="forbid", strict=True))
_open = with_config(ConfigDict(extra="allow", strict=True))

_Text = str
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Positive = Annotated[int, Field(ge=1, lt=2**63)]


def _keyed(name: str, types: dict[str, Any]) -> Any:
    """Declare a dictionary whose keys are listed elsewhere."""
    return _declared(TypedDict(name, types))  # type: ignore[operator]


def _like(pattern: str, needed: str) -> BeforeValidator:
    """Return a validator for strings of a certain form."""

    def check(value: object) -> object:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise PydanticCustomError("needed", needed)
        return value

    return BeforeValidator(check)


def _one_of(names: Iterable[str]) -> BeforeValidator:
    """Return a validator for one of some strings."""
    allowed = tuple(names)
    return _like("|".join(map(re.escape, allowed)), f"one of {', '.join(allowed)}")


def _chunks(value: Any) -> Any:
    """Validate a value of `speculative_prefill`."""
    if value not in ("auto", "off") and (type(value) is not int or value < 1):
        raise PydanticCustomError("needed", "auto, off or a number of chunks of at least 1")
    return value


_Digest = Annotated[str, _like("[0-9a-f]{64}", "64 hexadecimal digits")]
_Version = Annotated[str, _like("[0-9A-Za-z.+!_-]{1,40}", "a version such as 1.2.3")]
_Time = Annotated[
    str,
    _like(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", "a time in UTC such as 2026-01-31T12:00:00+00:00"),
]
_Quant = Annotated[str, _one_of(get_args(QuantName))]


@_declared
class Input(TypedDict):
    """The prompts of a run."""

    path: str  # as given; "-" if they were piped in
    folder: NotRequired[str]  # path from the output folder to where a relative path starts
    format: str
    sha256: str
    prompts: _Count | None
    prompt_column: str | None


@_declared
class Settings(TypedDict):
    """Settings that decide the speed of a run and change no output."""

    draft: str | None
    drafter: Annotated[str, _one_of(DRAFTERS)]
    draft_tokens: _Positive | None
    batch_size: _Positive
    draft_quant: _Quant
    threads: _Positive | None
    kv_memory: _Positive | None
    prefix_cache: bool
    speculative_prefill: Annotated[Any, AfterValidator(_chunks)]
    workers: NotRequired[_Positive | None]


@_declared
class Model(TypedDict):
    """A model: the digests of its files and of an adapter merged into it, and the dtype of the merged weights."""

    name: str
    digest: str
    quant: _Quant
    adapter: NotRequired[str]
    adapter_dtype: NotRequired[str]


@_declared
class Cuda(TypedDict):
    """The tools that compile kernels for a GPU."""

    capability: str
    toolkit: str | None
    triton: str
    ptxas: NotRequired[str]


@_declared
class Versions(TypedDict, total=False):
    """Libraries whose arithmetic or decisions the bits depend on."""

    transformers: str
    torch: str
    triton: str
    bitsandbytes: str


@_declared
class Profile(TypedDict):
    """Everything besides the request that decides the bits of an output."""

    target: Model
    dtype: str
    kv_dtype: str
    arithmetic: str
    device: NotRequired[str]
    capability: NotRequired[str | None]
    cuda: NotRequired[Cuda]
    versions: NotRequired[Versions]
    operators: NotRequired[list[str]]


_Counts = _keyed("Counts", dict.fromkeys((field.name for field in fields(DrafterStats)), _Count))
_Drafters = _keyed("Drafters", {name: NotRequired[_Counts] for name in DRAFTERS if name != "auto"})


@_declared
class AnswerCounts(TypedDict):
    """See `Answers`."""

    prompts: _Count
    right: _Count
    right_by_length: _Count
    unknown: _Count


@_declared
class Summary(TypedDict):
    """Totals of a run; `prompt_tokens` counts each prompt once."""

    prompts: _Count
    samples: _Count
    errors: _Count
    tokens: _Count
    prompt_tokens: _Count
    drafters: _Drafters  # type: ignore[valid-type]
    total: _Counts  # type: ignore[valid-type]
    answers: NotRequired[AnswerCounts]


@_declared
class File(TypedDict):
    """A file of a finished run."""

    sha256: _Digest
    bytes: _Count


# Parameters of a run: its defaults, whose ranges `SamplingParams` checks, and what else is the same for all prompts.
_Parameters = _keyed(
    "Parameters",
    dict.fromkeys(PARAMETERS, Any) | {"limit": _Positive | None, "seed_per_line": bool, "echo": bool},
)
_Files = _keyed("Files", {FILES[0]: File, **dict.fromkeys((*filter(None, LOGS.values()), RESULTS), NotRequired[File])})
_ScoreFiles = _keyed("ScoreFiles", {FILES[0]: File})


@_declared
class ScoreParameters(TypedDict):
    """The parameters shared by all prompts that are scored."""

    limit: _Positive | None
    echo: bool


@_declared
class _Manifest(TypedDict):
    detgen: _Version
    status: Annotated[str, _one_of(STATUSES)]
    created: _Time
    input: Input
    settings: Settings
    model: str | None
    adapter: NotRequired[str]
    model_stamp: str | None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    profile: Profile
    draft: Model | None
    summary: NotRequired[Summary]


@_declared
class RunManifest(_Manifest):
    """The manifest of `detgen run`."""

    parameters: _Parameters  # type: ignore[valid-type]
    acceptance_log: Annotated[str, _one_of(LOGS)]
    files: NotRequired[_Files]  # type: ignore[valid-type]


@_declared
class ScoreManifest(_Manifest):
    """The manifest of `detgen score`."""

    command: Literal["score"]
    parameters: ScoreParameters
    files: NotRequired[_ScoreFiles]  # type: ignore[valid-type]


def log_name(manifest: dict[str, Any]) -> str | None:
    """Return the name of a run's acceptance log; None if it has none."""
    return LOGS[manifest.get("acceptance_log", "off")]


@_open
class _OtherInput(TypedDict):
    path: str
    format: str
    sha256: str


@_open
class OtherManifest(TypedDict):
    """The manifest of another version of detgen, as far as an error message needs it."""

    detgen: _Version
    status: str
    input: _OtherInput
    parameters: dict[str, Any]
