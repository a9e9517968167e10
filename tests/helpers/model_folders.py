"""Model folders as a stranger might make them: copies of an embedded model, each with one thing wrong."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Damage = Callable[[Path, Path], None]  # is given the folder, and the canary: a file that only foreign code would make

FORMS = {"object": "{}", "list": "[]", "empty": "", "text": '"x"', "null": "null"}


@dataclass(frozen=True)
class BadFolder:
    """What is wrong with a folder, and what becomes of a run with it.

    Attributes:
        name: of the case.
        damage: makes it so.
        said: a part of the error that is expected; of the output line where `status` is 0 or 1.
        status: expected exit status.
    """

    name: str
    damage: Damage
    said: str
    status: int = 2


class Canary:
    """Makes the canary when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")


def setting(**changes: Any) -> Damage:
    return lambda folder, _: edit(folder / "config.json", **changes)


def edited(file: str, **changes: Any) -> Damage:
    return lambda folder, _: edit(folder / file, **changes)


def content(file: str, text: str | bytes) -> Damage:
    def damage(folder: Path, _: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).write_bytes(text.encode() if isinstance(text, str) else text)

    return damage


def template(text: str) -> Damage:
    return content("chat_template.jinja", text)


def code(file: str, key: str, **changes: Any) -> Damage:
    """A file that names code of the folder, and the code."""

    def damage(folder: Path, canary: Path) -> None:
        source = f"import os\nos.mkdir({str(canary)!r})\nclass Thing: pass\n"
        (folder / "code.py").write_text(source)
        target = "code.Thing"
        value: Any = [target, target] if key == "AutoTokenizer" else target
        names = {"AutoConfig": target, "AutoModelForCausalLM": target} if key == "AutoConfig" else {key: value}
        edit(folder / file, auto_map=names, **changes)

    return damage


def pickled(folder: Path, canary: Path) -> None:
    """Weights as a pickle that runs a function."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Canary(canary)}) + bytes(10**6))


def pickled_in_an_archive(folder: Path, canary: Path) -> None:
    import torch

    (folder / "model.safetensors").unlink()
    torch.save({"weight": Canary(canary), "more": torch.zeros(10**6)}, folder / "pytorch_model.bin")


def weights(change: Callable[[dict[str, Any]], None]) -> Damage:
    """Other weights in the same file."""

    def damage(folder: Path, _: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def raw_weights(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path, _: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def header(change: Callable[[dict[str, Any]], None]) -> Damage:
    """Another header before the same bytes."""

    def changed(file: bytes) -> bytes:
        length = struct.unpack("<Q", file[:8])[0]
        found = json.loads(file[8 : 8 + length])
        change(found)
        made = json.dumps(found).encode()
        return struct.pack("<Q", len(made)) + made + file[8 + length :]

    return raw_weights(changed)


def twice(file: bytes) -> bytes:
    """A header that has its last tensor twice, with the bytes of another in the second place."""
    length = struct.unpack("<Q", file[:8])[0]
    text = file[8 : 8 + length].rstrip()
    found = json.loads(text)
    name = list(found)[-1]
    made = text[:-1] + b"," + json.dumps({name: found[name]}).encode()[1:]
    return struct.pack("<Q", len(made)) + made + file[8 + length :]


def moved(tensors: dict[str, Any]) -> None:
    """The first norm of each layer lies where that of the first layer lies."""
    norms = [name for name in tensors if name.endswith(".input_layernorm.weight")]
    for name in norms:
        tensors[name] = tensors[norms[0]]


def whole(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].int()


def index(weight_map: Any) -> Damage:
    def damage(folder: Path, _: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def instead(file: str, make: Callable[[Path], None]) -> Damage:
    def damage(folder: Path, _: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return damage


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def tokens_beyond(folder: Path, _: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: i + 100_000 for token, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def no_tokenizer(folder: Path, _: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def layer(tensors: dict[str, Any], number: int) -> str:
    return next(name for name in sorted(tensors) if f".layers.{number}." in name)


def double(tensors: dict[str, Any]) -> None:
    name = layer(tensors, 0)
    tensors[name] = tensors[name].repeat(*[2] * tensors[name].dim())


def settings() -> Iterator[BadFolder]:
    """Wrong values in config.json."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
    for name in sizes:
        for value in ("abc", -1, 0, 10**12, 1.5, True):
            yield BadFolder(f"{name} {value}", setting(**{name: value}), f"config.json: {name}")
    for name, value, said in (
        ("hidden_size", 2**20, "config.json: it describes"),
        ("hidden_size", 10**9, ""),
        ("hidden_size", 100, ""),
        ("intermediate_size", 10**9, "config.json: it describes"),
        ("vocab_size", 10**9, "config.json: it describes"),
        ("vocab_size", 100, "do not fit config.json"),
        ("num_hidden_layers", 10**9, "config.json: num_hidden_layers"),
        ("num_hidden_layers", 1, "config.json describes no such weights"),
        ("num_hidden_layers", 9, "weights are missing"),
        ("num_attention_heads", 3, ""),
        ("num_key_value_heads", 3, ""),
        ("head_dim", 0, "config.json: head_dim"),
        ("head_dim", 7, ""),
        ("model_type", None, "config.json: model_type"),
        ("model_type", 7, "config.json: model_type"),
        ("model_type", "\x1b]0;owned\x07\n\u202e", r"\x1b"),
        ("model_type", "vit", ""),
        ("model_type", "../../etc", ""),
        ("eos_token_id", "end", "config.json: eos_token_id"),
        ("eos_token_id", [0, "end"], "config.json: eos_token_id"),
        ("eos_token_id", 10**20 - 1, "config.json: eos_token_id"),
        ("query_pre_attn_scalar", -1, "config.json: query_pre_attn_scalar"),
        ("num_labels", 10**9, "config.json: num_labels"),
        ("decoder_layers", 10**9, "config.json: decoder_layers"),
        ("hidden_act", "os.system", ""),
        ("rms_norm_eps", "small", ""),
        ("dtype", "float1", ""),
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}, ""),
        ("rope_parameters", [1], ""),
        ("layer_types", ["full_attention"], ""),
        ("attention_bias", True, "weights are missing"),
        ("tie_word_embeddings", False, "weights are missing: lm_head"),
        ("quantization_config", [], ""),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "config.json: quantization_config says"),
        ("num_local_experts", 10**9, "config.json: num_local_experts"),
        ("attn_implementation", "stranger/kernel", "names code on the hub"),
        ("transformers_weights", "../weights.safetensors", "config.json: transformers_weights"),
    ):
        shown = ascii(value)
        yield BadFolder(f"{name} {shown}", setting(**{name: value}), said)


def files() -> Iterator[BadFolder]:
    """Files that are not what their names say."""
    for file, key, value in (
        ("generation_config.json", "eos_token_id", 10**20 - 1),
        ("tokenizer_config.json", "model_max_length", "x"),
    ):
        yield BadFolder(f"{file} {key} {value}", edited(file, **{key: value}), f"{file}: {key}")
    yield BadFolder(
        "a BertTokenizer",
        edited("tokenizer_config.json", tokenizer_class="BertTokenizer"),
        "the tokenizer of ",
        0,  # a chat has tokens that the model knows
    )
    for file in ("config.json", "tokenizer_config.json", "generation_config.json"):
        for name, text in FORMS.items():
            if name != "object" or file == "config.json":
                yield BadFolder(f"{file} {name}", content(file, text), file)
        yield BadFolder(f"{file} latin-1", content(file, '{"model_type": "é"}'.encode("latin-1")), file)
        yield BadFolder(f"{file} nested", content(file, '{"a":' * 10**5), f"{file}: it is nested too deeply")
        yield BadFolder(f"{file} long number", content(file, '{"a": ' + "9" * 10**5 + "}"), file)
    for file in ("config.json", "tokenizer.json", "special_tokens_map.json", "model.safetensors"):
        yield BadFolder(f"{file} a pipe", instead(file, os.mkfifo), f"{file}: this is not a regular file")
        yield BadFolder(f"{file} a loop", instead(file, lambda path: path.symlink_to(path.name)), file)
        yield BadFolder(f"{file} a folder", instead(file, Path.mkdir), f"{file}: this is not a regular file")
        yield BadFolder(
            f"{file} a device", instead(file, lambda path: path.symlink_to("/dev/zero")), f"{file}: this is not"
        )
        yield BadFolder(f"{file} of a tebibyte", instead(file, sparse), file)
    for name, text in {**FORMS, "garbage": "\x00\x01", "nested": '{"a":' * 10**5, "model": '{"model": 1}'}.items():
        yield BadFolder(f"tokenizer.json {name}", content("tokenizer.json", text), "tokenizer.json")
    yield BadFolder("no tokenizer", no_tokenizer, "tokenizer.json")
    yield BadFolder("tokens beyond the vocabulary", tokens_beyond, "does not fit its config.json", 1)
    yield BadFolder("positions without end", setting(max_position_embeddings=2**31 - 1), "", 0)
    yield BadFolder("an adapter", content("adapter_config.json", '{"base_model_name_or_path": "x"}'), "adapter_config")


def weight_files() -> Iterator[BadFolder]:
    """Weights that are damaged, or do not belong to the configuration."""
    file = "model.safetensors"
    yield BadFolder("weights absent", lambda folder, _: (folder / file).unlink(), "there are no weights")
    yield BadFolder("weights cut short", raw_weights(lambda b: b[:-1000]), f"{file}: it is cut short")
    yield BadFolder("weights cut in the header", raw_weights(lambda b: b[:100]), f"{file}: it is cut short")
    yield BadFolder("weights too long", raw_weights(lambda b: b + bytes(10)), f"{file}: it is longer")
    yield BadFolder("weights empty", raw_weights(lambda _: b""), f"{file}: it is cut short")
    yield BadFolder("weights of text", raw_weights(lambda _: b"<html>" * 1000), f"{file}: it is cut short")
    yield BadFolder("weights with a header of 2**63", raw_weights(lambda b: b"\xff" * 8 + b[8:]), file)
    yield BadFolder("weights without JSON", raw_weights(lambda b: b[:8] + b"x" + b[9:]), f"{file}: it is not JSON")
    yield BadFolder("weights without places", header(lambda h: h.update(extra={})), f"{file}: its header")
    yield BadFolder(
        "weights in one place", header(lambda h: h.update(extra=h[layer(h, 0)])), f"{file}: its tensors overlap"
    )
    yield BadFolder("weights with a gap", header(moved), f"{file}: its tensors overlap or leave a gap")
    yield BadFolder("a weight twice", raw_weights(twice), "twice")
    yield BadFolder("a weight of whole numbers", weights(whole), "model.norm.weight has whole numbers (I32)")
    wrong = {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}
    yield BadFolder("weights of an unknown type", header(lambda h: h.update(extra=wrong)), "")
    yield BadFolder("a weight missing", weights(lambda t: t.pop(layer(t, 0))), "weights are missing")
    yield BadFolder("a weight of another shape", weights(double), "do not fit config.json")
    yield BadFolder(
        "a weight too many",
        weights(lambda t: t.update({"model.layers.0.more": t["model.norm.weight"].clone()})),
        "more",
    )
    yield BadFolder("an index to elsewhere", index({"a": "../model.safetensors"}), "model.safetensors.index.json")
    yield BadFolder("an index of nothing", index({}), "model.safetensors.index.json: weight_map")
    yield BadFolder("an index of numbers", index([1]), "model.safetensors.index.json: weight_map")


def foreign_code() -> Iterator[BadFolder]:
    """Code that is not to run."""
    trust = "--trust-remote-code"
    strange = {"model_type": "strange"}
    yield BadFolder("code of the configuration", code("config.json", "AutoConfig", **strange), trust)
    yield BadFolder("code of the model", code("config.json", "AutoModelForCausalLM", **strange), "config.json")
    tokenizer = {"tokenizer_class": "Strange"}
    yield BadFolder("code of the tokenizer", code("tokenizer_config.json", "AutoTokenizer", **tokenizer), trust)
    yield BadFolder("code that nothing needs", code("config.json", "AutoConfig"), "", 0)
    yield BadFolder("a pickle", pickled, "cannot load the model")
    yield BadFolder("a pickle in an archive", pickled_in_an_archive, "cannot load the model")
    garbage = content("pytorch_model.bin", b"\x80\x05garbage" + bytes(10**6))

    def unreadable(folder: Path, canary: Path) -> None:
        (folder / "model.safetensors").unlink()
        garbage(folder, canary)

    yield BadFolder("a pickle of nothing", unreadable, "cannot load the model")


def templates() -> Iterator[BadFolder]:
    """Chat templates that do not end, or ask for everything."""
    too_much = "it takes more than"
    ranges = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    yield BadFolder("a template that loops", template(ranges), too_much, 0)
    yield BadFolder("a template of memory", template("{{ 'a' * 10**10 }}"), too_much, 0)
    doubling = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    yield BadFolder("a template that doubles", template(doubling), too_much, 0)
    yield BadFolder("a template with a power", template("{{ 9 ** (9 ** 9) }}"), too_much, 0)
    yield BadFolder("a template with a width", template("{{ '%9999999999d' % 1 }}"), "the chat template refuses", 0)
    yield BadFolder("a template that writes", template("{{ 'a' * 2**27 }}"), "writes more than", 0)
    yield BadFolder("a template that counts", template("{% for i in range(10**12) %}{% endfor %}"), "Range too big", 0)
    recursion = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    yield BadFolder("a template that calls itself", template(recursion), "the chat template refuses", 0)
    yield BadFolder("a template that ends early", template("{% for"), "the chat template refuses", 0)
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    yield BadFolder("a template that climbs", template(escape), "the chat template refuses", 0)


ALL = [*foreign_code(), *templates(), *weight_files(), *files(), *settings()]
