from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.fingerprint import Hasher

from detgen import LLM, PromptsError, Request, RequestError, SamplingParams, ScoreRequest
from detgen.engine import Engine


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_memory="16MiB")


PROMPTS = ["def add(a, b):", "import", [5, 6, 7]]


def test_it_gives_what_the_engine_gives(llm: LLM) -> None:
    """In the order of the prompts, samples in order; parameters by name replace those of the object."""
    params = SamplingParams(max_tokens=6, temperature=1.0, n=2)
    found = llm.generate(PROMPTS, params, seed=3)
    wanted = Engine(kv_memory=16 << 20, batch_size=2).generate(PROMPTS, params, seed=3)
    assert [(c.request.index, c.sample, c.token_ids) for c in found] == [
        (c.request.index, c.sample, c.token_ids) for c in wanted
    ]
    assert found.texts == [c.text for c in wanted]


def test_what_is_asked_in_other_forms(llm: LLM) -> None:
    request = Request(id="mine", prompt="import", params=SamplingParams(max_tokens=2))
    [same, again] = llm.generate([request, request])
    assert (same.request.id, same.text) == ("mine", again.text)
    with pytest.raises(RequestError, match="parameters of its own"):
        llm.generate(request, max_tokens=3)
    with pytest.raises(RequestError, match="max_tokens"):
        llm.generate("x", max_tokens=0)
    with pytest.raises(TypeError, match="no sampling parameter"):
        llm.generate("x", nothing=1)


def test_a_stream_reads_no_further_than_it_must(llm: LLM) -> None:
    read = []

    def prompts() -> Any:
        for i in range(100):
            read.append(i)
            yield f"def f{i}("

    stream = llm.stream(prompts(), max_tokens=1)
    assert next(stream).request.index < 20
    assert len(read) < 60
    stream.close()
    assert [done.text for done in llm.stream("import", max_tokens=2)] == llm.generate("import", max_tokens=2).texts


def test_scores_of_texts_and_completions(llm: LLM) -> None:
    several = llm.score([("import", [" os\n", " re\n"]), "import os\n", ScoreRequest(prompt="x", completions=("",))])
    assert [(score.request.index, score.sample) for score in several] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert several[3].error
    table = several.to_dataset()
    assert table["completion"][:] == [" os\n", " re\n", None, None]
    assert table["logprob"][0] == several[0].logprob
    assert table["logprobs"][0] == list(several[0].logprobs)


def test_a_table_has_what_an_export_has(llm: LLM) -> None:
    done = llm.generate(["import", ""], max_tokens=3, logprobs=0)
    frame = done.to_pandas()
    assert list(frame["prompt"]) == ["import", ""]
    assert frame["text"][0] == done[0].text
    assert list(frame["token_ids"][0]) == list(done[0].token_ids)
    assert frame["error"][1] == "the prompt is empty"
    assert done[0].logprobs is not None
    assert list(frame["logprobs"][0]) == [entry.logprob for entry in done[0].logprobs]


def test_a_request_without_a_prompt_says_how_to_give_one(llm: LLM) -> None:
    (done,) = llm.generate(Request([5, 6, 7]))  # type: ignore[arg-type]
    assert done.error == "the request has no prompt: give prompt, messages or token_ids by name"


def test_a_notebook_shows_text_as_text(llm: LLM) -> None:
    shown = llm.generate(["<b>&", "x" * 1000], max_tokens=2)._repr_html_()
    assert "&lt;b&gt;&amp;" in shown
    assert "<b>" not in shown
    assert "x" * 301 not in shown
    assert "20 of them shown" in llm.generate(["a"] * 21, max_tokens=1)._repr_html_()
    assert "antigravity" in llm.score(("import", " antigravity"))._repr_html_()
    assert llm.generate([])._repr_html_()


def test_a_dataset_is_mapped(llm: LLM, tmp_path: Path) -> None:
    """In batches; a row's own parameters come first; what cannot run has its reason, also in the first batch."""
    rows = {"prompt": [None, "import", "class B:"], "max_tokens": [3, None, 4], "text": ["old"] * 3}
    ds = datasets.Dataset.from_dict(rows)
    found = ds.map(llm, batched=True, batch_size=1, fn_kwargs={"max_tokens": 2})
    assert found["error"][:] == ["neither prompt nor messages is given", "", ""]
    assert found["completion_tokens"][:] == [0, 2, 4]
    assert found["text"][1:] == [
        *llm.generate("import", max_tokens=2).texts,
        *llm.generate("class B:", max_tokens=4).texts,
    ]
    assert found["finish_reason"][:] == ["error", "length", "length"]


def test_what_cannot_be_mapped_is_said(llm: LLM) -> None:
    with pytest.raises(PromptsError, match=r'rename_column\("question", "prompt"\)'):
        llm({"question": ["a"]})
    for row in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(PromptsError, match="batched=True"):
            llm(row)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="n must be 1"):
        llm({"prompt": ["a"]}, n=2)


def test_datasets_knows_it_by_all_that_decides(llm: LLM) -> None:
    """A copy is the same; another number format is not."""
    copy = pickle.loads(pickle.dumps(llm))
    assert Hasher.hash(copy) == Hasher.hash(llm)
    assert copy.generate("import", max_tokens=4).texts == llm.generate("import", max_tokens=4).texts
    assert Hasher.hash(LLM(kv_memory=16 << 20, quant="q8")) != Hasher.hash(llm)


def test_importing_it_is_cheap() -> None:
    code = (
        "import sys, detgen; detgen.LLM; assert not {'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
