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


def test_selection_bias_only_chooses():
    """Scores .881, .731, .5, .269 with b = (0, 0, .3, 0): experts 0 and 2, from .881 and .5."""
    router = tb.SigmoidRouter(4, 4, 2)
    router.selection_bias[2] = 0.3
    (weights,), (experts,) = routed(router, [LOGITS])
    assert experts == [0, 2]
    assert weights == pytest.approx([0.8808 / 1.3808, 0.5 / 1.3808], abs=1e-4)


def test_groups_by_their_best_or_two():
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


def test_sinks_fit_the_query_heads():
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


def test_one_module_as_several_experts():
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


class OwnRouter(nn.Module):
    """Whatever it is told to choose."""

    def __init__(self, weights: Tensor, experts: Tensor):
        super().__init__()
        self.choice = weights, experts

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.choice


def own_mixture(weights: list, experts: list, dtype: torch.dtype = torch.int64) -> tb.MixtureFFN:
    router = OwnRouter(torch.tensor(weights).double(), torch.tensor(experts, dtype=dtype))
    torch.manual_seed(0)
    return tb.MixtureFFN(router, [tb.GatedFFN(4, 3) for _ in range(3)]).double()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_own_router_chooses_any_expert(dtype):
    ffn, x = own_mixture([[0.5, 2.0], [1.0, -1.0]], [[2, 0], [1, 2]], dtype), torch.randn(2, 4)
    x = x.double()
    e = ffn.experts
    wanted = torch.stack((0.5 * e[2](x[0]) + 2 * e[0](x[0]), e[1](x[1]) - e[2](x[1])))
    torch.testing.assert_close(ffn(x), wanted)


@pytest.mark.parametrize("wrong", [3, -1, 300, -(2**62)])
def test_experts_out_of_range(wrong):
    ffn = own_mixture([[0.5, 2.0], [1.0, 1.0]], [[2, 0], [1, wrong]])
    with pytest.raises(ValueError, match=r"router\(x\)\[1\] must be 0 … 2, got 1 other"):
        ffn(torch.randn(2, 4).double())


@pytest.mark.parametrize(
    ("weights", "experts", "said"),
    [
        ([[0.5], [1.0]], [[2, 0], [1, 2]], r"router\(x\)\[0\] .*\[2, 2\].*\[2, 1\]"),
        ([0.5, 1.0], [[2], [1]], r"router\(x\)\[0\] .*\[2, 1\].*\[2\]"),
        ([0.5, 1.0], [2, 1], r"router\(x\)\[1\] .*\[2, k\].*\[2\]"),
        ([[0.5]], [[2]], r"router\(x\)\[1\] .*\[2, k\].*\[1, 1\]"),
    ],
)
def test_weights_of_another_shape(weights, experts, said):
    with pytest.raises(ValueError, match=said):
        own_mixture(weights, experts)(torch.randn(2, 4).double())


def test_experts_that_are_no_integers():
    with pytest.raises(TypeError, match=r"router\(x\)\[1\] .*integer"):
        own_mixture([[0.5], [1.0]], [[2.0], [1.0]], torch.float32)(torch.randn(2, 4).double())


@pytest.mark.parametrize("n_experts", [3, 5])
def test_switch_router_of_other_width(n_experts):
    ffn = tb.MoEFFN(4, 3, n_experts=4)
    ffn.router = nn.Linear(4, n_experts, bias=False)
    with pytest.raises(ValueError, match=rf"router\(x\) .*\[2, 4\].*\[2, {n_experts}\]"):
        ffn(torch.randn(2, 4))


@pytest.mark.parametrize("sink", [-math.inf, -1e30, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_whatever_the_sink(causal, sink):
    layer = tb.SinkAttention(4).double()
    nn.init.constant_(layer.sinks, sink)
    q, k, v = (torch.randn(2, n, T, 4).double() for n, T in ((4, 5), (2, 3), (2, 3)))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    keep = torch.ones(2, 1, 5, 3, dtype=torch.bool)
    keep[0, 0, 4] = False
    out = layer(q, k, v, keep, causal=causal)
    empty = [(0, 4)] + ([(0, 0), (0, 1), (1, 0), (1, 1)] if causal else [])  # T > S: no key yet
    for b in range(2):
        for t in range(5):
            assert out[b, :, t].eq(0).all() == ((b, t) in empty)
    out.square().sum().backward()
    for tensor in (q, k, v, layer.sinks):
        assert tensor.grad.isfinite().all()
    if sink == -math.inf:  # then it is no part of the softmax
        torch.testing.assert_close(out, tb.attend(q, k, v, keep, causal=causal))


def test_nan_stays_with_infinite_sinks():
    layer = tb.SinkAttention(2)
    nn.init.constant_(layer.sinks, -math.inf)
    q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 3, 4)
    q[0, 1] = math.nan
    out = layer(q, k, k, torch.ones(3, dtype=torch.bool))
    assert out[0, 1].isnan().all() and out[0, 0].isfinite().all()
