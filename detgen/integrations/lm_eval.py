"""detgen as a model of EleutherAI's lm-evaluation-harness: `lm_eval --model detgen`.

The harness knows only models that have been imported, so this module wraps its command line:
`python -m detgen.integrations.lm_eval run --model detgen --model_args target=FOLDER --tasks ...`. In Python, import
it before `lm_eval.simple_evaluate(model="detgen", ...)`.

The model is asked the same, token by token, as the harness's own `hf` model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from detgen.engine import Engine
from detgen.engine.config import EngineConfig
from detgen.engine.request import Completion, Request
from detgen.engine.score_requests import Score, ScoreRequest
from detgen.engine.scored import rolling_windows
from detgen.errors import EngineError, RequestError
from detgen.models.loading import pick_device
from detgen.params import PARAMETERS, SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(f"the harness is not installed ({error}): pip install 'detgen[lm-eval]'") from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_MOST_TOKENS = 256  # of a completion if a task sets no limit, as for the harness's own models
# Names of parameters in tasks, and their names here.
_NAMES = {"until": "stop", **dict.fromkeys(("max_gen_toks", "max_new_tokens", "max_completion_tokens"), "max_tokens")}
_EMBEDDED = "embedded:target"  # its name in manifests, too
_Done = TypeVar("_Done", Score, Completion)


@register_model("detgen")
class DetgenLM(TemplateLM):
    """A model of the harness, computed by an `Engine`; no score depends on the batch.

    Args:
        target: folder, GGUF file or hub name of the model; None or "embedded:target" is the embedded one. `pretrained`
            is an alias.
        pretrained: see target.
        batch_size: most requests at a time; "auto" is detgen's own default.
        device: as in `EngineConfig`; cuda:0, the default of the harness's command line, means auto.
        max_batch_size: ignored; the harness passes it to all models.
        max_length: most tokens to read; None, or more than the model's context, means that context.
        max_gen_toks: most tokens to generate if a task sets no limit.
        engine: an engine to use instead; settings that `Engine.with_settings` may change can still be given.
        settings: other fields of `EngineConfig`, such as dtype, drafter or kv_memory.

    Raises:
        EngineError: if the engine cannot be built; the message names the remedy.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = _MOST_TOKENS,
        engine: Engine | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if unknown := settings.keys() - set(EngineConfig.__slots__):
            raise EngineError(f"{', '.join(sorted(unknown))}: no such setting of detgen; see `EngineConfig`")
        if (target is not None) + (pretrained is not None) + (engine is not None) > 1:
            raise EngineError("target, pretrained and engine all name the model; give one of them")
        if batch_size is not None and not str(batch_size).startswith("auto"):
            settings["batch_size"] = int(batch_size)
        if device not in (None, "cuda:0"):
            settings["device"] = device
        name = target if target is not None else pretrained
        name = None if name == _EMBEDDED else name
        self.engine = Engine(name, **settings) if engine is None else engine.with_settings(**settings)
        self.tokenizer = self.engine.tokenizer
        self.max_length = min(max_length or self.engine.context, self.engine.context)
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        first = self.tokenizer.bos_token_id
        return int(first) if first is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Name by which the harness distinguishes its caches of rendered prompts."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize a text, with special tokens unless it begins with one already."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens).input_ids)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat as text by the model's own template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness's results tell about the model: everything that a score depends on."""
        return {"detgen_profile": self.engine.profile()}

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Score tokens after others; what is too long loses its beginning, as in the harness."""
        asked = []
        for i, (_, context, continuation) in enumerate(requests):
            kept = (context + continuation)[-(self.max_length + 1) :]
            if not continuation or len(continuation) >= len(kept):
                raise RequestError(
                    f"request {i} has {len(context)} tokens of context and {len(continuation)} of continuation,"
                    f" where the model has room for {self.max_length}"
                )
            before = kept[: -len(continuation)]
            asked.append(ScoreRequest(i, i, token_ids=tuple(before), completions=(tuple(continuation),)))
        found = []
        for (pair, _, _), score in zip(requests, _in_order(self.engine.score_stream(asked), disable_tqdm), strict=True):
            found.append((score.logprob, score.is_greedy))
            self.cache_hook.add_partial("loglikelihood", pair, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probabilities of whole texts, in windows if they are too long."""
        texts = [instance.args[0] for instance in requests]
        asked: list[ScoreRequest] = []
        for i, text in enumerate(texts):
            tokens = self.tok_encode(text)
            windows = rolling_windows(tokens, self.prefix_token_id, self.max_length) if tokens else iter(())
            for window in windows:
                before, behind = window.tokens[: -window.scored], window.tokens[-window.scored :]
                asked.append(ScoreRequest(len(asked), i, token_ids=tuple(before), completions=(tuple(behind),)))
        logprobs: list[list[float]] = [[] for _ in texts]
        for score in _in_order(self.engine.score_stream(asked), disable_tqdm):
            logprobs[int(score.request.id)].extend(score.logprobs)
        found = [math.fsum(each) for each in logprobs]
        for text, logprob in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), logprob)
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate texts up to the first stop string, greedily unless the task says otherwise."""
        asked = [self._generation(i, *instance.args) for i, instance in enumerate(requests)]
        found = [done.text for done in _in_order(self.engine.stream(asked), disable_tqdm)]
        for instance, text in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", instance.args, text)
        return found

    def _generation(self, i: int, context: str, asked: dict[str, Any]) -> Request:
        """Make the request for a generation."""
        named: dict[str, Any] = {"max_tokens": self.max_gen_toks}
        for name, value in asked.items():
            if value is not None:
                named[_NAMES.get(name, name)] = value
        if not named.pop("do_sample", named.get("temperature", 0) > 0):
            named["temperature"] = 0.0
        elif "temperature" not in named:
            named["temperature"] = 1.0
        if unknown := named.keys() - PARAMETERS.keys():
            raise RequestError(f"{', '.join(sorted(unknown))}: detgen has no such generation parameter")
        stop = named.pop("stop", ())
        params = SamplingParams(stop=tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s), **named)
        room = self.max_length - params.max_tokens
        if room < 1:
            raise RequestError(f"max_gen_toks must be below {self.max_length}, got {params.max_tokens}")
        tokens = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        return Request(i, i, token_ids=tuple(tokens), params=params)


def _in_order(batches: Iterable[list[_Done]], silent: bool) -> Iterator[_Done]:
    """Yield the results of a stream in order of their index.

    Raises:
        RequestError: if one could not run.
    """
    from tqdm import tqdm

    found: dict[int, _Done] = {}
    with tqdm(disable=silent, desc="Running detgen", unit=" requests") as bar:
        for batch in batches:
            bar.update(len(batch))
            for done in batch:
                if done.error is not None:
                    raise RequestError(f"request {done.request.index}: {done.error}")
                found[done.request.index] = done
    yield from (found[index] for index in sorted(found))


def main() -> None:
    """Run the harness's command line with detgen among its models."""
    from lm_eval.__main__ import HarnessCLI, setup_logging

    setup_logging()
    command_line = HarnessCLI()
    arguments = command_line.parse_args()
    if getattr(arguments, "model", None) == "detgen" and not arguments.config:
        name_what_runs(arguments)
    command_line.execute(arguments)


def name_what_runs(arguments: Any) -> None:
    """Add model and device to the arguments, so that the harness's results name them.

    By default, results name the device cuda:0, and the model by `pretrained` only.

    Args:
        arguments: arguments of the harness's command line; changed.
    """
    given = arguments.model_args = dict(arguments.model_args or {})
    if "pretrained" not in given:
        given["pretrained"] = given.pop("target", _EMBEDDED)
    if arguments.device is None:
        arguments.device = str(pick_device("auto"))


if __name__ == "__main__":
    main()
