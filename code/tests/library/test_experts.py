"""Routers, mixtures, clamped experts, sinks: figures by hand, threads, synchronisations, state."""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformer_block as tb
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def set_scores(router: nn.Module, rows: list[list[float]]) -> Tensor:
    """Tokens for which the router's logits are these rows."""
    nn.init.eye_(router.router.weight)
    return torch.tensor(rows, dtype=torch.float64)


def routed(router: nn.Module, rows: list[list[float]]) -> tuple[list, list]:
    weights, experts = router.double()(set_scores(router, rows))
    return weights.tolist(), experts.tolist()


LOGITS = [2.0, 1.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("make", "weights"),
    [
        (lambda: tb.SoftmaxRouter(4, 4, 1, renormalise=False), [0.6439]),
        (lambda: tb.SoftmaxRouter(4, 4, 2), [0.7311, 0.2689]),
        (lambda: tb.SoftmaxRouter(4, 4, 2, renormalise=False), [0.6439, 0.2369]),
        (lambda: tb.SoftmaxRouter(4, 4, 2, renormalise=False, scale=16.0), [10.303, 3.790]),
        (lambda: tb.SigmoidRouter(4, 4, 2, scale=2.5), [1.3661, 1.1339]),
        (lambda: tb.SigmoidRouter(4, 4, 2), [0.5464, 0.4536]),
        (lambda: tb.SigmoidRouter(4, 4, 1, renormalise=False, selection_bias=False), [0.8808]),
    ],
    ids=["Switch", "Mixtral", "Qwen3 default", "DeepSeek-V2", "DeepSeek-V3", "M2", "Llama-4"],
)
def test_weights_of_the_families(make, weights):
    found, experts = routed(make(), [LOGITS])
    assert found[0] == pytest.approx(weights, abs=1e-3)
    assert experts == [list(range(len(weights)))]


def test_selection_bias_chooses_and_does_not_weigh():
    """Scores .881, .731, .5, .269 with b = (0, 0, .3, 0): experts 0 and 2, from .881 and .5."""
    router = tb.SigmoidRouter(4, 4, 2)
    router.selection_bias[2] = 0.3
    (weights,), (experts,) = routed(router, [LOGITS])
    assert experts == [0, 2]
    assert weights == pytest.approx([0.8808 / 1.3808, 0.5 / 1.3808], abs=1e-4)


def test_groups_score_as_their_best_or_their_best_two():
    """Scores (.9 .1 | .6 .5 | .7 .2 | .3 .3), two groups of four, two experts."""
    scores = torch.tensor([0.9, 0.1, 0.6, 0.5, 0.7, 0.2, 0.3, 0.3], dtype=torch.float64)
    groups = {"renormalise": False, "n_groups": 4, "top_groups": 2}
    _, experts = routed(tb.SoftmaxRouter(8, 8, 2, **groups), [scores.log().tolist()])
    assert experts == [[0, 4]]
    _, experts = routed(tb.SigmoidRouter(8, 8, 2, **groups), [torch.logit(scores).tolist()])
    assert experts == [[0, 2]]


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [(1, 0, 0.845796), (1, 2, 2.537387), (10, 10, 55.99963), (2, -1, 0), (-9, 0, -2e-6)],
)
def test_clamped_expert_by_hand(gate, up, expected):
    ffn = tb.ClampedGatedFFN(1, 1).double()
    with torch.no_grad():
        for layer, weight in ((ffn.gate, gate), (ffn.up, up), (ffn.down, 1)):
            layer.weight.fill_(weight)
            layer.bias.zero_()
        assert ffn(torch.ones(1, dtype=torch.float64)).item() == pytest.approx(expected, abs=1e-5)


def test_sink_by_hand():
    """Scores 1, 0, -1 and a sink of 0.5: the keys keep 0.7125 = sigmoid(logsumexp - 0.5)."""
    sink = tb.SinkAttention(1).double()
    nn.init.constant_(sink.sinks, 0.5)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).view(1, 1, 3, 1)
    v = torch.eye(3, dtype=torch.float64)[None, None]
    weights = sink(q, k, v).flatten()
    assert weights.tolist() == pytest.approx([0.4740, 0.1744, 0.0641], abs=1e-4)
    lse = math.log(sum(math.exp(score) for score in (1, 0, -1)))
    assert weights.sum().item() == pytest.approx(1 / (1 + math.exp(0.5 - lse)))
    nn.init.constant_(sink.sinks, -math.inf)
    torch.testing.assert_close(sink(q, k, v), tb.attend(q, k, v))


def test_sinks_fit_the_query_heads_or_are_refused_before_anything_is_drawn():
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="n_q_heads=2"):
        tb.MultiHeadAttention(16, 4, 2, attend=tb.SinkAttention(2))
    assert torch.equal(state, torch.get_rng_state())
    attn = tb.MultiHeadAttention(16, 4, 2, attend=tb.SinkAttention(4))
    assert dict(attn.named_parameters())["attend.sinks"].shape == (4,)


# =============================================================================================
# What holds for all of them
# =============================================================================================


def mixture(**options) -> tb.MixtureFFN:
    torch.manual_seed(0)
    router = tb.SigmoidRouter(8, 6, 2, n_groups=3, top_groups=2)
    return tb.MixtureFFN(
        router, (tb.GatedFFN(8, 5) for _ in range(6)), tb.DenseFFN(8, 5), **options
    )


LAYERS = {"MoEFFN": lambda: tb.MoEFFN(8, 5, n_experts=6), "MixtureFFN": mixture}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@torch.no_grad()
def test_threads_share_a_layer(make):
    layer = make().double()
    inputs = [torch.randn(3 + i % 5, 8, dtype=torch.float64) for i in range(8)]
    expected = [layer(x) for x in inputs]

    def differs(i: int) -> bool:
        return any(not torch.equal(layer(inputs[i]), expected[i]) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(differs, range(8)))


class Waits(TorchFunctionMode):
    """Counts what brings numbers from the device to the host."""

    WAITING = frozenset(
        {Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__index__}
        | {Tensor.nonzero, torch.nonzero, torch.bincount, Tensor.bincount, Tensor.unique}
    )

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in self.WAITING
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_one_synchronisation_a_forward(make):
    layer = make()
    with Waits() as waits:
        layer(torch.randn(7, 8))
    assert waits.count == 1


def test_work_grows_with_the_choices():
    layer, rows = mixture(), []
    for expert in layer.experts:
        expert.register_forward_hook(lambda _expert, args, _out: rows.append(len(args[0])))
    layer(torch.randn(2, 9, 8))
    assert len(rows) == 6
    assert sum(rows) == 2 * 9 * 2


def test_state_dict_and_copies():
    layer = mixture()
    layer(torch.randn(3, 8))
    names = set(layer.state_dict())
    assert {"router.router.weight", "router.selection_bias", "shared.up.weight"} <= names
    assert {"experts.5.gate.weight"} <= names
    assert len(names) == 1 + 1 + 6 * 3 + 2
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.router.aux_loss == layer.router.aux_loss
        assert not copied.router.aux_loss.requires_grad
        assert copied.router.tokens_per_expert == layer.router.tokens_per_expert
    plain = tb.SigmoidRouter(8, 6, 2, selection_bias=False)
    assert set(plain.state_dict()) == {"router.weight"}


def test_one_module_may_be_several_experts():
    torch.manual_seed(0)
    expert, router = tb.GatedFFN(8, 5), tb.SoftmaxRouter(8, 4, 3)
    layer, x = tb.MixtureFFN(router, [expert] * 4), torch.randn(5, 8)
    torch.testing.assert_close(layer(x), expert(x))  # the weights sum to 1
    assert sum(p.numel() for p in layer.parameters()) == 3 * 8 * 5 + 8 * 4


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@torch.no_grad()
def test_a_nan_stays_in_its_row(make):
    layer, x = make(), torch.randn(6, 8)
    expected = layer(x)
    x[2] = math.nan
    out = layer(x)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(out[others], expected[others])


def test_gradients_of_the_mixture():
    """Against finite differences, in every input and weight; choices stay what they are."""
    torch.manual_seed(3)
    layer = mixture(weigh_input=True).double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters))
