"""The second and the third order of the bug round: right answers are right, wrong ones are named."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from judge.round.orders import judged
from judge.round.paper import clean_paper
from judge.round.states import States
from judge.round.subject import Subject

CACHE = """

def step(self, ids, cache=None):
    start = 0 if cache is None else cache[0][0].shape[2]
    at = torch.arange(start, start + ids.shape[1])
    rows = self.place_table(at) if isinstance(self.place_table, nn.Embedding) else self.place_table[at]
    h, kept = self.token_table(ids) + rows, []
    for number, block in enumerate(self.blocks):
        normed = block.norm_a(h)
        B, T, d = normed.shape
        heads = SETTINGS_HEADS
        if hasattr(block.attn, "to_q"):
            parts = [f(normed) for f in (block.attn.to_q, block.attn.to_k, block.attn.to_v)]
        else:
            parts = block.attn.to_qkv(normed).chunk(3, -1)
        q, k, v = (p.view(B, T, heads, d // heads).transpose(1, 2) for p in parts)
        if cache is not None:
            k, v = torch.cat((cache[number][0], k), 2), torch.cat((cache[number][1], v), 2)
        kept.append((k, v))
        may = torch.arange(k.shape[2]) <= at[:, None]
        y = F.scaled_dot_product_attention(q, k, v, may)
        h = h + block.attn.proj(y.transpose(1, 2).reshape(B, T, d))
        h = h + block.mlp(block.norm_b(h))
    h = self.last_norm(h)
    head = self.head.weight if hasattr(self, "head") else self.token_table.weight
    return h @ head.T, kept


GPT.step = step


@torch.no_grad()
def generate_cached(model, ids, n, temperature=1.0, top_k=None):
    mode = model.training
    model.eval()
    new, cache = ids, None
    for _ in range(n):
        logits, cache = model.step(new, cache)
        logits = logits[:, -1]
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            logits = logits / temperature
            if top_k is not None:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
            new = torch.multinomial(logits.softmax(-1), 1)
        ids = torch.cat((ids, new), 1)
    model.train(mode)
    return ids
"""

CLASSIFIER = """

class Classifier(nn.Module):
    def __init__(self, model, n_classes):
        super().__init__()
        self.model = model
        self.out = nn.Linear(model.token_table.embedding_dim, n_classes)

    def forward(self, ids, mask):
        h = []
        hook = self.model.last_norm.register_forward_hook(lambda part, args, result: h.append(result))
        self.model(ids)
        hook.remove()
        POOLED
        return self.out(pooled)
"""
LAST = "pooled = h[0][torch.arange(len(ids)), mask.sum(1) - 1]"
MEAN = "pooled = (h[0] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)"


@pytest.fixture(scope="module", params=[0, 3, 8])
def paper(request):
    return clean_paper(request.param, 4)


def found(paper, addition: str) -> dict:
    names = paper.names | {"SETTINGS_HEADS": "3"}
    words = re.compile(rf"\b({'|'.join(names)})\b")
    text = paper.text() + words.sub(lambda word: names[word[0]], addition)
    states = States(paper, ())
    return judged(Subject(text, paper.names, "theirs.py"), states.layout)


def test_nothing_added_is_not_judged(paper):
    assert found(paper, "") == {}


@pytest.mark.parametrize("pooled", [LAST, MEAN], ids=["last", "mean"])
def test_right_answers_are_right(paper, pooled):
    both = CACHE + CLASSIFIER.replace("POOLED", pooled)
    assert found(paper, both) == {"second": None, "third": None}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("start = 0 if cache is None else cache[0][0].shape[2]", "start = 0", "off the full pass"),
        ("may = torch.arange(k.shape[2]) <= at[:, None]",
         "may = torch.arange(k.shape[2]) <= torch.arange(T)[:, None]", "off the full pass"),
        ("(cache[number][0], k)", "(cache[0][0], k)", "off the full pass"),
        ("new, cache = ids, None\n", "new, cache = ids, None\n    model(ids)\n", "full model is called 1"),
        ("model.step(new, cache)", "model.step(ids)", r"step reads \[4, 5, 6"),
        ("    model.train(mode)\n", "", "in eval mode"),
        ("logits.argmax", "logits.argmin", "greedy tokens are those of generate"),
        ("return h @ head.T, kept", "return (h @ head.T)[:, -1:], kept", "shape"),
        ("h, kept = self.token_table(ids) + rows, []\n",
         "h, cache = self.token_table(ids) + rows, self.kept if start else None\n"
         "    self.kept = kept = []\n", "disturb each other"),
        ("return h @ head.T, kept", "return h @ head, kept", "raises RuntimeError"),
    ],
)  # fmt: skip
def test_a_wrong_cache_is_named(old, new, says):
    text = CACHE.replace(old, new)
    assert text != CACHE
    assert re.search(says, found(clean_paper(0, 4), text)["second"])


@pytest.mark.parametrize(
    ("pooled", "says"),
    [
        ("pooled = h[0][:, -1]", "under the padding|more padding"),
        ("pooled = h[0].mean(1)", "under the padding|more padding"),
        ("pooled = h[0][torch.arange(len(ids)), mask.sum(1) - 2]", "no gradient reaches some"),
        ("pooled = h[0][:, 0]", "no gradient reaches some of the real tokens"),
        ("pooled = (h[0] * mask[..., None]).sum(1) / mask.sum()", "a row alone"),
        ("pooled = h[0].detach()[torch.arange(len(ids)), mask.sum(1) - 1]", "no gradient reaches"),
        ("pooled = h[0][:1, 0]", "shape"),
    ],
)
def test_a_wrong_classifier_is_named(pooled, says):
    assert re.search(says, found(clean_paper(0, 4), CLASSIFIER.replace("POOLED", pooled))["third"])


def test_a_classifier_holds_the_model_itself():
    text = CLASSIFIER.replace("POOLED", LAST).replace("= model\n", "= GPT(Settings())\n")
    assert "does not hold" in found(clean_paper(0, 4), text)["third"]
