"""The sampling parameters of a request, each declared once. Uses no tensors.

Everything else reads the declarations: the keys of a JSON line and their checks, the options of the commands, the
tables of the documentation, the manifest, the digests of requests, and the arrays that kernels choose tokens by.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_type_hints

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from detgen.declaring import Option
from detgen.errors import RequestError

MOST = 2**31 - 1  # the most tokens, and the highest token ID; more is a mistake
_LONGEST_GUIDE = 1_000_000  # characters of a schema, a regular expression or a grammar
# Parameters that constrain the text: a line or a run sets at most one of them.
GUIDES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FREE: dict[str, Any] = {name: () if name == "guided_choice" else None for name in GUIDES}  # no guide
_SPAN = 1000  # a range of whole numbers is described with its upper end if that is at most this


@dataclass(frozen=True, slots=True)
class Aliases:
    """Other names of a parameter in a JSON line."""

    names: tuple[str, ...]


class Beside:
    """Marks a parameter that the text of a verified sample does not depend on."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Marks a number that affects how a row's token is drawn; kernels take an array with one entry per row.

    Attributes:
        dtype: numpy's name of the array's dtype.
        filter: whether it may drop tokens when its value is not the default.
    """

    dtype: Literal["float64", "int64", "uint64"]
    filter: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """Marks a parameter that is not a single number or flag.

    Attributes:
        needed: what it must be, in words.
        unit: what its entries or its length are counted in, in the plural.
    """

    needed: str
    unit: str


def _several(value: Any) -> Any:
    """Return a string as a tuple of one, a list as a tuple, and any other value as it is."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _biases(value: Any) -> Any:
    """Return `logit_bias`, an object or already a sequence of pairs, as pairs sorted by ID."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        return value
    found: dict[int, float] = {}
    for key, bias in pairs:
        token = int(key) if isinstance(key, str) and len(key) < 20 and key.isascii() and key.isdecimal() else key
        if type(token) is not int or token < 0:
            raise RequestError(f"logit_bias must have token ids as keys, got {shown(key)}")
        if token in found:
            raise RequestError(f"logit_bias names token {token} twice")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise RequestError(f"logit_bias of token {token} must be a number from -100 to 100, got {shown(bias)}")
        found[token] = float(bias)
    return tuple(sorted(found.items()))


def _json_schema(value: Any) -> Any:
    """Return a JSON schema, an object or its text, as text. Keys keep their order, which the output follows."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"guided_json is not JSON: {error}") from None
        if isinstance(value, str):
            raise RequestError(f"guided_json must be a JSON schema, an object or its text, got {shown(value)}")
    try:
        return json.dumps(value) if isinstance(value, dict) else value
    except RecursionError:
        raise RequestError("guided_json is nested too deeply") from None


def _schema_file(path: str) -> str:
    """Return the text of a file with a JSON schema."""
    try:
        text = Path(path).read_text("utf-8")
        value = json.loads(text)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON schema, which is an object, got {shown(value)}")
    return text


_Text = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, le=MOST)]


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen. Lists and objects of JSON become tuples.

    The logits are adjusted first, in vLLM's order: `logit_bias`, `repetition_penalty`, `frequency_penalty` and
    `presence_penalty`, then the tokens that `min_tokens` or one of `GUIDES` rules out are excluded
    (`detgen.kernels.penalties`). Temperature and the filters follow, in the order of their declaration. All of this
    depends on the request's own tokens alone. Reported log-probabilities are those of the model's unadjusted logits.

    Raises:
        RequestError: if a value has the wrong type or is out of range; the message names the parameter, what it may be
            and its value.
        TypeError: if there is no such parameter.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    PANEL: ClassVar = "Sampling"

    max_tokens: Annotated[
        int,
        Field(ge=1, le=MOST, description="Maximum number of tokens to generate per sample."),
        Option("N", panel="Options"),
        Aliases(("max_new_tokens", "max_completion_tokens")),
    ] = 128
    temperature: Annotated[
        float,
        Field(ge=0, le=1e4, description="0 always takes the most likely token; 1 samples as the model predicts."),
        Option("T", panel="Options"),
        Drawn("float64"),
    ] = 0.0
    top_p: Annotated[
        float,
        Field(gt=0, le=1, description="Sample from the most likely tokens that together have probability P; 1 is off."),
        Option("P"),
        Drawn("float64", filter=True),
    ] = 1.0
    top_k: Annotated[
        int,
        Field(ge=0, le=MOST, description="Sample from the K most likely tokens; 0 is off."),
        Option("K"),
        Drawn("int64", filter=True),
    ] = 0
    min_p: Annotated[
        float,
        Field(ge=0, le=1, description="Drop tokens less likely than P times the most likely one; 0 is off."),
        Option("P"),
        Drawn("float64", filter=True),
    ] = 0.0
    seed: Annotated[
        int,
        Field(ge=0, le=2**63 - 1, description="Seed of the sampling noise. Another seed gives another sample."),
        Option("N", panel="Options"),
        Drawn("uint64"),
    ] = 0
    n: Annotated[int, Field(ge=1, le=1_000_000, description="Samples per prompt."), Option("N", "--n"), Beside()] = 1
    stop: Annotated[
        tuple[_Text, ...],
        Field(max_length=1000, description="End the text before TEXT."),
        BeforeValidator(_several, json_schema_input_type=_Text | Annotated[list[_Text], Field(max_length=1000)]),
        Option(
            "TEXT",
            panel="Options",
            note="May be given several times. Taken literally: write a newline as $'\\n'.",
        ),
        Listed("a non-empty string or a list of them", "strings"),
    ] = ()
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=100, description="Write the log-probabilities of each token and of the N most likely ones."),
        Option("N"),
    ] = None
    deterministic: Annotated[
        bool,
        Field(description="Verify each token, so that the output is the same bytes every time."),
        Option(panel="Expert", note="--no-deterministic decodes once, without the guarantee."),
        Beside(),
    ] = True
    # Also with `ignore_eos`, no end-of-sequence token and none of `stop_token_ids` comes before, and no stop string
    # within their text counts.
    min_tokens: Annotated[
        int, Field(ge=0, le=MOST, description="Generate at least N tokens before a sample may end."), Option("N")
    ] = 0
    stop_token_ids: Annotated[
        tuple[_TokenId, ...],
        Field(max_length=10_000, description="End the text before the token with this ID."),
        BeforeValidator(_several, json_schema_input_type=Annotated[list[_TokenId], Field(max_length=10_000)]),
        Option("ID", "--stop-token-id", note="May be given several times."),
        Listed("a list of token ids", "ids"),
    ] = ()
    ignore_eos: Annotated[
        bool, Field(description="Continue past end-of-sequence tokens, up to the limit."), Option()
    ] = False
    # A positive logit is divided, a negative one multiplied.
    repetition_penalty: Annotated[
        float,
        Field(ge=0.01, le=100, description="Divide the logits of tokens in the prompt or the text by P; 1 is off."),
        Option("P"),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        Field(ge=-2, le=2, description="Subtract P from a token's logit for each time it occurs in the text."),
        Option("P"),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Field(ge=-2, le=2, description="Subtract P from the logits of tokens that occur in the text."),
        Option("P"),
    ] = 0.0
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],  # sorted by token ID
        Field(max_length=300_000, description="Numbers to add to the logits of tokens, by token ID."),
        BeforeValidator(_biases, json_schema_input_type=dict[str, Annotated[float, Field(ge=-100, le=100)]]),
        Listed("an object from token ids to numbers from -100 to 100", "ids"),
    ] = ()
    # What the text must be; at most one of these (`GUIDES`).
    guided_json: Annotated[
        str | None,
        Field(max_length=_LONGEST_GUIDE, description="Generate JSON that fits the schema in FILE."),
        BeforeValidator(_json_schema, json_schema_input_type=dict[str, Any] | str),
        Option("FILE", "--json-schema", parser=_schema_file),
        Listed("a JSON schema, an object or its text", "characters"),
    ] = None
    guided_regex: Annotated[
        str | None,
        Field(
            min_length=1, max_length=_LONGEST_GUIDE, description="Generate a full match of the regular expression R."
        ),
        Option("R", "--regex"),
        Listed("a regular expression", "characters"),
    ] = None
    guided_choice: Annotated[
        tuple[_Text, ...],
        Field(max_length=10_000, description="Generate one of the texts given."),
        BeforeValidator(_several, json_schema_input_type=_Text | Annotated[list[_Text], Field(max_length=10_000)]),
        Option("TEXT", "--choice", note="Give the option once for each text."),
        Listed("a non-empty string or a list of them", "strings"),
    ] = ()
    guided_grammar: Annotated[
        str | None,
        Field(min_length=1, max_length=_LONGEST_GUIDE, description="Generate text of a grammar, in Lark or GBNF."),
        Listed("a grammar, in Lark or GBNF", "characters"),
    ] = None

    if not TYPE_CHECKING:  # type checkers read the fields instead

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _refusal(error, values) from None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(given := [name for name in GUIDES if getattr(self, name)]) > 1:
            raise RequestError(f"both {given[0]} and {given[1]} are given; give one of them")
        if (characters := sum(map(len, self.guided_choice))) > _LONGEST_GUIDE:
            raise RequestError(f"guided_choice must have at most {_LONGEST_GUIDE} characters in all, got {characters}")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        return self

    def with_(self, **changes: Any) -> Self:
        """Return a copy with some values changed and checked. Setting one of `GUIDES` unsets the others."""
        if any(changes.get(name) for name in GUIDES):
            changes = FREE | changes
        own = self.__dict__  # checked already; only `max_tokens` and `min_tokens` depend on each other
        made = type(self)(**{"max_tokens": self.max_tokens, "min_tokens": self.min_tokens, **changes})
        made.__dict__.update({name: own[name] for name in own.keys() - changes.keys()})
        return made

    def check_ids(self, vocabulary: int) -> None:
        """Check that all token IDs are within a vocabulary of this size.

        Raises:
            RequestError: if one is not; the message names the parameter and the ID.
        """
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", [i for i, _ in self.logit_bias])):
            if (largest := max(ids, default=0)) >= vocabulary:
                raise RequestError(f"{name} must have ids from 0 to {vocabulary - 1} for this model, got {largest}")

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Return the parameters whose values are not the defaults."""
        return ((name, value) for name, value in self.__dict__.items() if value != PARAMETERS[name].default)


@dataclass(frozen=True, slots=True)
class Parameter:
    """The declaration of a field of `SamplingParams`.

    Attributes:
        name: the name of the field, and the key in a JSON line.
        type: the type of its values, such as `int`, `float | None` or `tuple[str, ...]`.
        default: its value if none is given.
        help: what it does, in a sentence that may name the option's metavar.
        low: the least value; None if there is none.
        above: an exclusive lower bound; None if there is none.
        high: the greatest value; None if there is none.
        most: the greatest number of entries or characters; None if there is none.
        option: how a command line asks for it; None if no command does.
        aliases: its other names in a JSON line.
        changes_text: whether the text of a verified sample depends on it.
        drawn: how kernels take it; None if they do not.
        listed: how it is described; None for a single number or flag.
    """

    name: str
    type: Any
    default: Any
    help: str
    low: float | None
    above: float | None
    high: float | None
    most: int | None
    option: Option | None
    aliases: tuple[str, ...]
    changes_text: bool
    drawn: Drawn | None
    listed: Listed | None

    @property
    def kind(self) -> type:
        """The type of a single value: bool, int, float, str or tuple."""
        return next((kind for kind in (bool, int, float, str) if self.type in (kind, kind | None)), tuple)

    @property
    def flag(self) -> str:
        """The option's name."""
        named = self.option.name if self.option is not None else None
        return named or "--" + self.name.replace("_", "-")

    @property
    def needed(self) -> str:
        """What a value must be, in words."""
        if self.listed is not None:
            return self.listed.needed
        if self.kind is bool:
            return "true or false"
        low = self.low if self.above is None else self.above
        if self.kind is float:
            return f"a number from {low:g} to {self.high:g}"
        return f"a whole number {f'from {low} to {self.high}' if self._tells_most else f'of at least {low}'}"

    @property
    def _tells_most(self) -> bool:
        return self.high is not None and self.high <= _SPAN

    def refusal(self, why: str, value: Any) -> str:
        """Return the message for a value that pydantic refuses; `why` is the type of pydantic's error."""
        if why in ("too_long", "string_too_long") and self.listed is not None:
            return f"{self.name} must be at most {self.most} {self.listed.unit}, got {len(value)}"
        if why == "greater_than" and value == self.above:
            return f"{self.name} must be above {self.above:g} ({self.default:g} turns it off), got {shown(value)}"
        if why == "less_than_equal" and self.kind is int and not self._tells_most:
            return f"{self.name} must be at most {self.high}, got {shown(value)}"
        return f"{self.name} must be {self.needed}, got {shown(value)}"


_TYPES = get_type_hints(SamplingParams)


def _parameter(name: str) -> Parameter:
    field = SamplingParams.model_fields[name]

    def of(kind: Any, part: str | None = None) -> Any:
        found = next((item for item in field.metadata if isinstance(item, kind)), None)
        return found if found is None or part is None else getattr(found, part)

    return Parameter(
        name,
        _TYPES[name],
        field.default,
        field.description or "",
        low=of(Ge, "ge"),
        above=of(Gt, "gt"),
        high=of(Le, "le"),
        most=of(MaxLen, "max_length"),
        option=of(Option),
        aliases=of(Aliases, "names") or (),
        changes_text=of(Beside) is None,
        drawn=of(Drawn),
        listed=of(Listed),
    )


# The parameters by name, in the order of their declaration.
PARAMETERS: dict[str, Parameter] = {name: _parameter(name) for name in SamplingParams.model_fields}


def _refusal(error: ValidationError, values: Mapping[str, Any]) -> Exception:
    """Return the exception for the first wrong value."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        found: Exception = first["ctx"]["error"]
        return found
    name, *within = first["loc"]
    if first["type"] == "string_unicode":
        check_text(str(name), first["input"])
    if first["type"] == "extra_forbidden":
        return TypeError(f"there is no sampling parameter {name!r}")
    if within and first["type"] == "less_than_equal":
        return RequestError(f"{name} must have ids of at most {MOST}, got {shown(first['input'])}")
    long = first["type"] == "string_too_long" and not within  # a schema is measured as text, even if given as an object
    given = first["input"] if long else values[str(name)]
    return RequestError(PARAMETERS[str(name)].refusal("" if within else first["type"], given))


def check_text(name: str, text: str) -> None:
    """Refuse half a surrogate pair: JSON can spell it ("\\ud800"), but no tokenizer can read it.

    Raises:
        RequestError: if there is one; the message names `name`, the half and its position.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise RequestError(f"{name} holds half a character, \\u{half:04x} at position {error.start}") from None


def shown(value: object) -> str:
    """Return a value as error messages show it, shortened to 80 characters."""
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
