"""The exercise LoRALinear: a class that is given a linear layer and trains two matrices."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from judge.assignment import Flags
from judge.cases import Case, Trouble, as_tensor, drawn, result_of
from judge.classes import ClassExercise, Subject
from judge.compare import Expectation, equal_outputs, kind_in_words
from judge.subjects import LoadedModule, Sizes


class AdapterExercise(ClassExercise):
    """sizes: in, out, rank, alpha, and bias 1 or 0 of the linear layer."""

    def linear(self, sizes: Sizes) -> nn.Linear:
        """The layer that is adapted, the same at every call."""
        linear = nn.Linear(sizes["in"], sizes["out"], bias=bool(sizes["bias"]))
        for name, p in linear.named_parameters():
            p.data.copy_(0.4 * drawn(name, *p.shape))
        return linear

    def build(self, cls: type, sizes: Sizes) -> nn.Module:
        torch.manual_seed(0)
        return cls(self.linear(sizes), sizes["rank"], sizes["alpha"])

    def inputs(
        self, sizes: Sizes, B: int, T: int, scale: float = 1.0, name: str = "x"
    ) -> list[Tensor]:
        return [scale * drawn(name, B, T, sizes["in"]).to(torch.get_default_dtype())]

    def letters(self, sizes: Sizes, B: int, T: int) -> Mapping[int, str]:
        return {sizes["in"]: "in", sizes["out"]: "out", T: "T", B: "B"}

    def call(self, sizes: Sizes, inputs: Iterable[object], more: str = "") -> str:
        bias = "" if sizes["bias"] else ", bias=False"
        made = f"nn.Linear({sizes['in']}, {sizes['out']}{bias})"
        rest = f"rank={sizes['rank']}, alpha={sizes['alpha']}"
        return f"{self.name}({made}, {rest})" + (more or "(x [2, 5, in])")

    def unused_entries(self, reference: LoadedModule, module: nn.Module, sizes: Sizes) -> Flags:
        return {}, torch.zeros(0, reference.weights.size, dtype=torch.bool)

    def fresh(self, sizes: Sizes) -> Case:
        """Before anything is trained."""

        def run(subject: Subject) -> dict[str, object]:
            linear = self.linear(sizes)
            weight = linear.weight.detach().clone()
            torch.manual_seed(0)
            module = subject.cls(linear, sizes["rank"], sizes["alpha"])
            if not isinstance(module, nn.Module):
                raise Trouble(f"it must be an nn.Module, it is {kind_in_words(module)}")
            trained = [p for p in module.parameters() if p.requires_grad]
            (x,) = self.inputs(sizes, 2, 5)
            y = as_tensor(result_of(module, x)).detach()
            zero = {p.numel(): not p.any() for p in trained}
            a, b = sizes["rank"] * sizes["in"], sizes["rank"] * sizes["out"]
            return {
                "the numbers that train": sum(p.numel() for p in trained),
                "the shape of y": list(y.shape),
                "whether B starts at zero": bool(zero.get(b, False)),
                "whether A starts at zero": bool(zero.get(a, False)),
                "whether y is the linear's": equal_outputs(linear(x).detach(), y),
                "whether the linear's weight is as it was": torch.equal(linear.weight, weight),
            }

        call = self.call(sizes, [], " as it starts")
        return Case(call, run, Expectation(self.letters(sizes, 2, 5)))

    def merging(self, sizes: Sizes) -> Case:
        """merged() gives a new layer and leaves everything else alone."""

        def run(subject: Subject) -> dict[str, object]:
            subject.forget_modules()  # a merge that changes the layer shall not be seen elsewhere
            module = subject.make(sizes).module
            (x,) = self.inputs(sizes, 2, 5)
            before = {k: v.detach().clone() for k, v in module.state_dict().items()}
            merged = module.merged()
            if merged is None:
                raise Trouble("merged() returns None: is a `return` missing?")
            if type(merged) is not nn.Linear:
                raise Trouble(
                    f"merged() must return an nn.Linear, it returned {kind_in_words(merged)}"
                )
            after = module.state_dict()
            same = before.keys() == after.keys()
            same = same and all(torch.equal(v, after[k]) for k, v in before.items())
            own = {p.data_ptr() for p in (*module.parameters(), *module.buffers())}
            shared = [name for name, p in merged.named_parameters() if p.data_ptr() in own]
            with torch.no_grad():
                found = {"merged()(x)": merged(x), "y after merged()": module(x)}
                found["that merging changes nothing"] = same
                found["what it shares with the layer"] = shared
                found["merged()(x) once more"] = module.merged()(x)
            subject.forget_modules()
            return found

        call = self.call(sizes, [], ".merged()")
        return Case(call, run, Expectation(self.letters(sizes, 2, 5)))

    def all_cases(self) -> list[Case]:
        """As it starts, with other weights, and merged."""
        usual, other = self.sizes
        cases = [self.fresh(other), self.fresh(usual), self.full(other, 1, 3)]
        cases += [self.full(usual, 2, 5), self.single(usual), self.merging(other)]
        return [*cases, self.merging(usual), self.backward(usual)]
