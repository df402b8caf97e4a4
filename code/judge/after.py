"""The cases of the losses after pre-training."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from judge.cases import (
    ArrayFunction,
    Case,
    Trouble,
    argument_as_shown,
    as_tensor,
    drawn,
    function_case,
    gradients_of,
    result_of,
)
from judge.compare import Expectation
from judge.gradients import arrays_case, number


def log_prob_cases() -> list[Case]:
    """Some rows, one token alone, logits whose exp overflows."""
    case = functools.partial(function_case, "token_log_probs", {"B": 3, "T": 5, "V": 7})
    logits = drawn("logits", 3, 5, 7)
    ids = torch.tensor([[1, 4, 0, 2, 6], [3, 3, 5, 0, 1], [2, 6, 1, 4, 5]])
    cases = [case(logits=logits[:1, :2], ids=ids[:1, :2]), case(logits=logits, ids=ids)]
    cases += [case(logits=logits[:, :1], ids=ids[:, :1], grads=False)]
    return [*cases, case(logits=1e4 * logits, ids=ids, more=" up to 1e4")]


def loss_case(
    name: str, leaves: tuple[str, ...], constants: tuple[str, ...], more: str = "",
    **arguments: object,
) -> Case:  # fmt: skip
    """A loss with its gradients by leaves; none may reach constants, where any are named."""

    def run(function: Callable) -> dict[str, object]:
        given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        result = result_of(function, *given.values())
        if isinstance(function, ArrayFunction):
            return {"the loss": number(result)}
        found = {"the loss": as_tensor(result).detach().reshape(())}
        if not found["the loss"].isfinite():
            return found
        tracked = {k: given[k].requires_grad_() for k in (*leaves, *constants)}
        gradients = gradients_of(as_tensor(function(*given.values())), tracked)
        for key in constants:
            grad = gradients.pop(f"the gradient of {key}")
            if grad is not None and grad.any():
                raise Trouble(f"a gradient reaches {key}, which is a constant: detach it")
        return found | gradients

    call = ", ".join(f"{k}{argument_as_shown(v)}" for k, v in arguments.items())
    return Case(f"{name}({call}){more}", run, Expectation(close=1e-7), inputs=arguments)


def dpo_cases() -> list[Case]:
    """One answer and five, betas small and large, margins of all sizes."""
    names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
    case = functools.partial(loss_case, "dpo_loss", names[:2], ())
    given = {name: drawn(name, 5) - 3 for name in names}
    one = {name: value[:1] for name, value in given.items()}
    far = {**given, "chosen": given["chosen"] - 3000}
    near = {**given, "chosen": given["chosen"] + 3000}
    return [
        case(**one, beta=1.0), case(**given, beta=0.1), case(**given, beta=2.0),
        case(**far, beta=0.5, more=", the rejected far likelier"),
        case(**near, beta=0.5, more=", the chosen far likelier"),
    ]  # fmt: skip


def grpo_cases() -> list[Case]:
    """Ratios inside and outside the clip on both sides, padding, rewards alike and nearly alike."""
    leaves, constants = ("log_probs",), ("old_log_probs", "ref_log_probs", "rewards")
    case = functools.partial(loss_case, "grpo_loss", leaves, constants)
    log_probs = -2 - drawn("log_probs", 4, 6).abs()
    near = {
        "log_probs": log_probs,
        "old_log_probs": log_probs + 0.05 * drawn("old", 4, 6),
        "ref_log_probs": log_probs + 0.5 * drawn("ref", 4, 6),
        "rewards": torch.tensor([1.0, 0.0, 0.3, 2.0]).double(),
    }
    far = {**near, "old_log_probs": log_probs + 0.6 * drawn("old", 4, 6)}
    full = torch.ones(4, 6, dtype=torch.bool)
    ragged = torch.arange(6) < torch.tensor([[6], [3], [1], [4]])
    two = {k: v[:2, :3] if v.ndim == 2 else v[:2] for k, v in near.items()}
    alike = {**near, "rewards": torch.full((4,), 0.7).double()}
    close = {**near, "rewards": torch.tensor([0.5, 0.501, 0.5, 0.502]).double()}
    return [
        case(**two, mask=full[:2, :3]), case(**near, mask=full), case(**far, mask=full),
        case(**near, mask=ragged), case(**far, mask=ragged),
        case(**alike, mask=ragged, more=" with equal rewards"),
        case(**close, mask=ragged, more=" with rewards 0.001 apart"),
        case(**far, mask=ragged, clip=0.4, beta=0.3), case(**far, mask=full, clip=0.1, beta=0.0),
        case(**{**far, "log_probs": log_probs - 1.0}, mask=ragged),
    ]  # fmt: skip


def gae_cases() -> list[Case]:
    """One step and seven; lam 0, lam 1, and between."""
    case = functools.partial(arrays_case, "gae", ("the result",), {"T": 7}, by_hand=False)
    rewards, values = drawn("rewards", 7), drawn("values", 8)
    cases = [case(rewards=rewards[:1], values=values[:2], gamma=0.9, lam=0.8)]
    cases += [case(rewards=rewards[:2], values=values[:3], gamma=0.9, lam=0.8)]
    for gamma, lam in ((0.9, 0.8), (0.9, 0.0), (0.7, 1.0), (1.0, 1.0), (0.0, 0.5)):
        cases.append(case(rewards=rewards, values=values, gamma=gamma, lam=lam))
    return cases


CASES = {
    "token_log_probs": log_prob_cases,
    "dpo_loss": dpo_cases,
    "grpo_loss": grpo_cases,
    "gae": gae_cases,
}
