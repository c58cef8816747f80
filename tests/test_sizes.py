"""The bounds of decision 0048: no file of more than 500 lines, no function of more than 100, and one
file in which tests name private state.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("handlers", "runtime", "loader", "infra", "src/teneral", "tests")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 100


def programs() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in programs()}
    assert len(lengths) > 500
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in programs()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


INSPECTION = ROOT / "tests" / "support" / "inspection.py"
# Of the standard library, where they are public, and of other projects, which have no public way.
OTHERS_NAMES = {
    "_replace", "_fields_", "_obj", "_exit", "_buffers", "_non_persistent_buffers_set", "_forward_pre_hooks",
    "_state_dict_pre_hooks", "_bound_deployment", "_request_id", "_get_default_session", "_patch_lang_tensor",
    "_need_fallback", "_retrieve_avg_logprobs", "_extract_token_timestamps",
}  # fmt: skip


def private_names(program: ast.AST) -> dict[str, int]:
    """The private attributes of other objects that a program names and does not define, by line."""
    own, used = set(), {}
    for node in ast.walk(program):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                own.add(node.attr)
            else:
                used[node.attr] = node.lineno
    return {name: line for name, line in used.items() if name not in own | OTHERS_NAMES}


def test_tests_name_private_state_in_one_file() -> None:
    """A change of private state is then a change of one line of the tests."""
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != INSPECTION and (names := private_names(ast.parse(path.read_text())))
    }
    assert found == {}
