"""The judge of what a reader wrote from memory; code/practice.py is its command line.

In a notebook, with code/ on the path: %load_ext judge, then a cell that starts with %%judge.
"""


def load_ipython_extension(shell: object) -> None:
    """What %load_ext judge calls."""
    from judge.notebook import register  # noqa: PLC0415, a program needs no notebook

    register(shell)
