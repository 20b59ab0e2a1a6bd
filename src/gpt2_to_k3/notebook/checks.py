"""Instant checks for exercises: smallest case first, and at the first difference what was expected and what came."""

import contextlib
import io
import warnings

import torch


class Verdict:
    """The outcome of a check; it prints as its message and is true when the exercise is solved."""

    def __init__(self, solved, message):
        self.solved, self.message = solved, message

    def __bool__(self):
        return self.solved

    def __repr__(self):
        return self.message


def check(yours, cases, *, rtol=None, atol=None):
    """Call ``yours`` on each case and compare with what is expected; stop at the first difference.

    Args:
        yours: the reader's function. While it raises NotImplementedError the verdict is "not written yet".
        cases: pairs (arguments, expected), smallest first. Tensors are passed as copies. Numbers, tensors and
            tuples of them are compared with ``torch.testing.assert_close``; 17, 17.0 and a tensor that
            holds one of them are the same number.
        rtol, atol: its tolerances (None: those of the dtype).
    """
    for arguments, expected in cases:
        call = f"{yours.__name__}({', '.join(map(_short, arguments))})"
        try:
            got = yours(*(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments))
        except NotImplementedError:
            return Verdict(False, f"{yours.__name__}: not written yet")
        except Exception as error:
            return Verdict(False, f"{call} raised {type(error).__name__}: {error}")
        try:
            got, expected = _alike(got, expected)
            torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, check_stride=False)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            about = str(error).strip().splitlines()
            # Tensors that differ in a late digit print alike.
            about = about[:1] + [x for x in about if x.startswith("Greatest absolute")]
            lines = [call, f"  expected {expected}", f"  got      {got}"]
            lines += [f"  {x}" for x in about]
            return Verdict(False, "\n".join(lines))
    return Verdict(True, f"{yours.__name__}: right ({len(cases)} cases)")


def require(yours, cases, *, rtol=None, atol=None):
    """``check`` for a graded cell: print the verdict if ``yours`` is right, and raise it if it is not.

    Warnings of ``yours`` are not shown, since a grader takes what is written to stderr for a failure.
    Raises:
        AssertionError: with the smallest failing case, what was expected and what came.
    """
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        verdict = check(yours, list(cases), rtol=rtol, atol=atol)
    if not verdict:
        raise AssertionError(str(verdict))
    print(verdict)


def _alike(got, expected):
    """Where a number is expected, any number is one: 17, 17.0, and a tensor that holds one element."""
    if isinstance(expected, tuple) and isinstance(got, tuple) and len(got) == len(expected):
        pairs = [_alike(x, y) for x, y in zip(got, expected, strict=True)]
        return tuple(x for x, _ in pairs), tuple(y for _, y in pairs)
    if type(expected) in (int, float):
        if isinstance(got, torch.Tensor) and got.ndim == 0 and not got.dtype.is_complex:
            got = got.item()
        if type(expected) is float and type(got) is int:
            return float(got), expected
        if type(expected) is int and type(got) is float and got.is_integer():
            return int(got), expected  # whole numbers are compared exactly
    return got, expected


def _short(x):
    """A large tensor as its dtype and shape, anything else as it prints."""
    if isinstance(x, torch.Tensor) and x.numel() > 16:
        return f"{x.dtype} {list(x.shape)}"
    return repr(x)
