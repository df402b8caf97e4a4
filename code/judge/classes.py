"""The exercises that are classes: how one is built and called, and the cases it is judged by."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from judge.assignment import Flags
from judge.cache_cost import copied, floating_tensors, numbers_gained
from judge.cases import Case, Trouble, argument_as_shown, as_tensor, drawn, result_of
from judge.catalogue import Task
from judge.compare import AtMost, Expectation, kind_in_words
from judge.subjects import LoadedModule, ReferenceClass, Sizes, Submission

Subject = ReferenceClass | Submission
NO_GRADIENT = 1e-9  # what a gradient of an entry that does not matter may come to
SINGLE_PRECISION = 1e-3  # of the largest value, for a pass in float32
INPUTS = {"memory": ("x", "memory"), "masked": ("x", "key_padding_mask")}


class ClassExercise:
    """A class to write. style says what forward takes and returns, sizes[0] is the usual case.

    style: "plain" forward(x); "masked" (x, key_padding_mask); "memory" (x, memory); "cached"
    (x, cache) gives (y, cache); "balance" forward(x) gives (y, balance_loss). drawn_steep names
    inputs for which steep scores have one clear winner each; None where scores do not matter.
    """

    def __init__(self, task: Task, style: str, sizes: list[Sizes], drawn_steep: str | None = None):
        self.task, self.name, self.style, self.sizes = task, task.name, style, sizes
        self.drawn_steep = drawn_steep
        self.cases = self.all_cases()
        self.weight_layouts: dict[tuple, dict[tuple, object]] = {}  # by sizes, then by parameters

    def build(self, cls: type, sizes: Sizes) -> nn.Module:
        """An instance of these sizes."""
        return cls(*sizes.values())

    def halves(self, sizes: Sizes) -> dict[str, dict[str, int]]:
        """How joined matrices of the answer are cut: their parts' rows, all heads together."""
        return {}

    # What goes in and comes out

    def inputs(
        self, sizes: Sizes, B: int, T: int, scale: float = 1.0, name: str = "x"
    ) -> list[Tensor]:
        """x [B, T, d_model], and memory [B, 7, d_model] where the class takes one."""
        d = sizes["d_model"]
        x = scale * drawn(name, B, T, d)
        if name == "crowded":  # tokens that are nearly alike go to one expert
            x = 0.2 * x + drawn("all tokens", d)
        memory = [drawn("memory", B, 7, d)] if self.style == "memory" else []
        return [tensor.to(torch.get_default_dtype()) for tensor in (x, *memory)]

    def results(
        self, module: nn.Module, *inputs: object, cache: tuple = (), guarded: bool = True
    ) -> dict[str, object]:
        """The outputs by name; cache is what the call before returned, in a tuple, or empty."""

        def forward(*inputs: object) -> object:
            return module(*inputs, *cache)

        returned = result_of(forward, *inputs) if guarded else forward(*inputs)
        if self.style not in ("cached", "balance"):
            return {"y": as_tensor(returned)}
        second = "cache" if self.style == "cached" else "balance_loss"
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise Trouble(
                f"forward must return (y, {second}), it returned {kind_in_words(returned)}"
            )
        y, rest = returned
        if self.style == "balance" and isinstance(rest, Tensor) and rest.numel() == 1:
            rest = rest.reshape(())
        return {"y": as_tensor(y), second: rest}

    def probe(self, module: nn.Module, sizes: Sizes) -> None:
        """Run it once; raises what it raises."""
        self.results(module, *self.inputs(sizes, 2, 5), guarded=False)

    def first_output(self, module: nn.Module, sizes: Sizes) -> Tensor | None:
        """The output of one full pass, None where it raises."""
        try:
            with torch.no_grad():
                return self.results(module, *self.inputs(sizes, 2, 5), guarded=False)["y"]
        except (Exception, SystemExit):
            return None

    def unused_entries(self, reference: LoadedModule, module: nn.Module, sizes: Sizes) -> Flags:
        """Which entries of parameters do not matter for one token, one key, an empty memory …

        That tells q from k, both from v and o, and the self-attention's maps from the others,
        whatever their names are. A bool [probes, *shape] by parameter, and [probes, places].
        """
        nothing = {}, torch.zeros(0, reference.weights.size, dtype=torch.bool)
        if self.style == "balance" or "top_k" in sizes:
            return nothing
        flat, theirs = [], defaultdict(list)
        for inputs in self._probing_inputs(sizes):
            self._backward_of_last(reference.module, inputs)
            flat.append(reference.gradient().abs() < NO_GRADIENT)
            try:
                self._backward_of_last(module, inputs)
            except (Exception, SystemExit):
                return nothing
            for name, p in module.named_parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                theirs[name].append(grad.abs() < NO_GRADIENT)
        module.zero_grad()
        return {name: torch.stack(masks) for name, masks in theirs.items()}, torch.stack(flat)

    def _probing_inputs(self, sizes: Sizes) -> list[tuple[Tensor, ...]]:
        x, *rest = self.inputs(sizes, 2, 5)
        last_empty = torch.cat((x[:, :-1], torch.zeros_like(x[:, -1:])), dim=1)
        probes = [(x[:, :1], *rest), (last_empty, *rest)]
        if self.style == "memory":
            probes += [(x, rest[0][:, :1]), (x, torch.zeros_like(rest[0]))]
        if self.style in ("memory", "masked"):
            probes.append((torch.zeros_like(x), *rest))
        return probes

    def _backward_of_last(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Gradients of what the last token gives."""
        module.zero_grad()
        y = self.results(module, *inputs, guarded=False)["y"]
        (y[:, -1] * drawn("loss", *y[:, -1].shape)).sum().backward()

    # Cases

    def call(self, sizes: Sizes, inputs: Iterable[object], more: str = "") -> str:
        """A call as it is shown."""
        given = zip(INPUTS.get(self.style, ("x",)), inputs)
        made = ", ".join(f"{key}={size}" for key, size in sizes.items())
        shown = ", ".join(f"{k}{argument_as_shown(v)}" for k, v in given)
        return f"{self.name}({made})({shown}){more}"

    def letters(self, sizes: Sizes, B: int, T: int) -> Mapping[int, str]:
        """The letters of a case's sizes."""
        return {7: "S", sizes["d_model"]: "d", T: "T", B: "B"}

    def full(
        self, sizes: Sizes, B: int, T: int, scale: float = 1.0, keep: Tensor | None = None,
        name: str = "x", steep: float = 1.0, more: str = "",
    ) -> Case:  # fmt: skip
        """One pass over T tokens; keep is a padding mask, steep what scores are multiplied by."""

        def run(subject: Subject) -> dict[str, object]:
            loaded = subject.make(sizes, steep)
            inputs = self.inputs(sizes, B, T, scale, name)
            inputs += [] if keep is None else [keep]
            found = self.results(loaded.module, *inputs)
            found.pop("cache", None)
            if keep is not None and found["y"].shape == inputs[0].shape:  # padding rows are free
                found["y"] = found["y"].masked_fill(~keep[..., None], 0)
            return found

        inputs = [*self.inputs(sizes, B, T), *([] if keep is None else [keep])]
        more = more or (f" with x of about {scale}" if scale != 1 else "")
        return Case(self.call(sizes, inputs, more), run, Expectation(self.letters(sizes, B, T)))

    def single(self, sizes: Sizes) -> Case:
        """In float32, which must come back."""

        def run(subject: Subject) -> dict[str, object]:
            with subject.in_dtype(torch.float32):
                loaded = subject.make(sizes)
                found = self.results(loaded.module, *self.inputs(sizes, 2, 5))
            found.pop("cache", None)
            return found

        call = self.call(sizes, self.inputs(sizes, 2, 5), " in float32")
        return Case(call, run, Expectation(self.letters(sizes, 2, 5), SINGLE_PRECISION))

    def backward(self, sizes: Sizes, T: int = 5) -> Case:
        """Gradients of the inputs and of all parameters."""

        def run(subject: Subject) -> dict[str, object]:
            loaded = subject.make(sizes)
            loaded.module.zero_grad()
            inputs = [x.requires_grad_() for x in self.inputs(sizes, 2, T)]
            found = self.results(loaded.module, *inputs)
            y = found["y"]
            if not y.requires_grad:
                raise Trouble("y has no gradient: something detaches it, or no_grad is on")
            loss = (y * drawn("loss", *y.shape)).sum()
            if isinstance(found.get("balance_loss"), Tensor):
                loss = loss + 3 * found["balance_loss"]
            loss.backward()
            names = ("x", "memory")
            outcome = {f"the gradient of {n}": i.grad for n, i in zip(names, inputs)}
            return outcome | {"the gradient of the parameters": loaded.gradient()}

        call = self.call(sizes, self.inputs(sizes, 2, T), " backward")
        return Case(call, run, Expectation(self.letters(sizes, 2, T)))

    def chunked(self, sizes: Sizes, B: int, chunks: tuple[int, ...]) -> Case:
        """The same tokens in chunks, each with the cache that the one before returned."""

        def run(subject: Subject) -> dict[str, object]:
            loaded = subject.make(sizes)
            (x,) = self.inputs(sizes, B, sum(chunks))
            found, cache, start = {}, (), 0
            with torch.no_grad():
                for number, length in enumerate(chunks, 1):
                    part = x[:, start : start + length]
                    returned = self.results(loaded.module, part, cache=cache)
                    cache = (returned["cache"],)
                    found[f"y of chunk {number}"] = returned["y"]
                    start += length
            return found

        inputs = self.inputs(sizes, B, sum(chunks))
        more = f" in chunks of {' + '.join(map(str, chunks))} tokens"
        letters = dict.fromkeys(chunks, "T") | {sizes["d_model"]: "d", B: "B"}
        return Case(self.call(sizes, inputs, more), run, Expectation(letters))

    def cost(self, sizes: Sizes) -> Case:
        """Numbers that the cache gains a token and row."""

        def run(subject: Subject) -> dict[str, object]:
            loaded = subject.make(sizes)
            (x,) = self.inputs(sizes, 2, 8)
            gains, cache, before = [], (), {}
            with torch.no_grad():
                for t in range(8):
                    returned = self.results(loaded.module, x[:, t : t + 1], cache=cache)
                    cache = (returned["cache"],)
                    after = copied(floating_tensors(cache[0]))
                    gains.append(numbers_gained(before, after))
                    before = after
            return {"the numbers cached for a token": AtMost(sorted(gains)[len(gains) // 2] // 2)}

        return Case(self.call(sizes, self.inputs(sizes, 2, 8), " a token at a time"), run)

    def fresh(self, sizes: Sizes) -> Case:
        """The norms' weights of a new module, before anything is trained."""

        def run(subject: Subject) -> dict[str, object]:
            start = subject.start(sizes)
            vectors = subject.make(sizes).weights.vectors
            return {
                f"{name} of the answer as it starts": start[places]
                for name, places in vectors.items()
            }

        return Case(f"{self.call(sizes, []).removesuffix('()')} as it starts", run)

    def all_cases(self) -> list[Case]:
        """From small to large."""
        usual, *others = self.sizes
        small = others[0] if others else usual
        cases = [self.full(small, 1, 1), self.full(small, 1, 3), self.full(usual, 2, 5)]
        cases += [self.full(sizes, 3, 4) for sizes in others[1:]]
        cases += [self.full(usual, 2, 5, scale) for scale in (3e-3, 3e-5)]
        cases += [self.full(usual, 4, 9), self.single(usual)]
        if self.style == "masked":
            cases[3:3] = self._padded(usual)
        if self.style == "cached":
            cases += [self.chunked(small, 1, (1, 1)), self.chunked(usual, 2, (3, 1, 4))]
            cases += [self.chunked(others[-1], 3, (2, 3)), self.cost(usual)]
            cases += [self.full(small, 1, 70)]
        if self.drawn_steep:
            said = " with scores up to hundreds"
            cases += [self.full(usual, 1, 4, name=self.drawn_steep, steep=300.0, more=said)]
        if "n_experts" in usual:
            said = " with most tokens for one expert"
            cases += [self.full(usual, 2, 40, name="crowded", more=said)]
        else:
            cases += [self.fresh(usual)]
        return [*cases, self.backward(usual)]

    def _padded(self, sizes: Sizes) -> list[Case]:
        """Padding on the right, of unequal lengths; on the left, and none."""
        padded = torch.arange(5) < torch.tensor([3, 1, 5])[:, None]
        holes = padded.flip(1) | torch.tensor([[False], [True], [True]])
        return [self.full(sizes, 3, 5, keep=padded), self.full(sizes, 3, 5, keep=holes)]


class LatentExercise(ClassExercise):
    """Latent attention: its answer joins matrices that others keep apart."""

    def halves(self, sizes: Sizes) -> dict[str, dict[str, int]]:
        """How its joined matrices are cut: their parts' rows, all heads together."""
        heads = sizes["n_heads"]
        nope, rope, v = (heads * sizes[key] for key in ("nope_dim", "rope_dim", "v_dim"))
        return {
            "q_proj.weight": {"q_nope.weight": nope, "q_rope.weight": rope},
            "kv_up.weight": {"k_up.weight": nope, "v_up.weight": v},
        }
