"""An error names a line of the user's, who may have installed a package, and none of Python's, PyTorch's or ours."""

from __future__ import annotations

import json
import os

import pytest
import torch

import elixir
from elixir.tracer.values.unknown_number import is_user_code

LIBRARY = os.path.dirname(os.__file__)


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        (__file__, True),
        ("/home/user/train.py", True),
        (f"{LIBRARY}/site-packages/trainer/loop.py", True),
        (json.__file__, False),
        (torch.__file__, False),
        (elixir.__file__, False),
        ("<string>", False),
    ],
)
def test_files_of_users_are_told_from_those_of_libraries(file: str, is_users: bool) -> None:
    assert is_user_code(file) is is_users
