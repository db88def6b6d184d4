"""Nothing in the sources can run code out of a file, or fetch from an address, that a job or another service names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in (ROOT / "libs", ROOT / "services")
    for path in folder.rglob("src/**/*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)

UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "pandas"}
FETCHERS = {"urllib.request", "requests", "fsspec", "s3fs", "boto3", "smart_open"}
RUNNERS = {"eval", "exec", "compile", "__import__"}

ALLOWED = {
    # The launcher and the tests ask servers that they have started on this machine whether they are there.
    ("libs/rlharvest/src/rlharvest/local/program.py", "imports urllib.request"),
    ("libs/rlharvest/src/rlharvest/testing/servers.py", "imports urllib.request"),
    ("libs/rlharvest/src/rlharvest/testing/system.py", "imports urllib.request"),
    # The one place that runs a user's file: the child process of the reward service, in its sandbox.
    ("services/reward/src/rlharvest_reward/functions.py", "exec_module"),
}


def name_of(node: ast.expr) -> str:
    """Dotted name of what is called, as far as it has one."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> object:
    for each in call.keywords:
        if each.arg == name:
            return each.value.value if isinstance(each.value, ast.Constant) else each.value
    return None


def faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.partition(".")[0] in UNPICKLERS or name in FETCHERS or name.partition(".")[0] in FETCHERS:
                    yield node.lineno, f"imports {name}"
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node.func)
        if name in RUNNERS:
            yield node.lineno, f"calls {name}"
        if name.endswith("exec_module"):
            yield node.lineno, "exec_module"
        if name.startswith("torch.") and name.endswith((".load", ".jit.load")):
            yield node.lineno, f"calls {name}"
        if name in ("np.load", "numpy.load") and keyword(node, "allow_pickle") is not False:
            yield node.lineno, f"calls {name} that may unpickle"
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") and not (
            len(node.args) == 2 and name_of(node.args[1]) == "_NoAlias"
        ):
            yield node.lineno, f"calls {name} without a safe loader"
        if name.endswith(".from_pretrained"):
            if keyword(node, "trust_remote_code") is not False or keyword(node, "local_files_only") is not True:
                yield node.lineno, f"{name} without trust_remote_code=False and local_files_only=True"
            if "Model" in name and keyword(node, "use_safetensors") is not True:
                yield node.lineno, f"{name} without use_safetensors=True"
        if keyword(node, "trust_remote_code") is True or keyword(node, "shell") is True:
            yield node.lineno, "trust_remote_code=True or shell=True"


def test_no_module_unpickles_runs_or_fetches_what_it_is_given() -> None:
    found = []
    for path in SOURCES:
        where = str(path.relative_to(ROOT))
        for line, fault in faults(ast.parse(path.read_text(encoding="utf-8"))):
            if (where, fault) not in ALLOWED:
                found.append(f"{where}:{line} {fault}")
    assert found == []
    assert len(SOURCES) > 100


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=True)",
        "import numpy as np\nnp.load('x')",
        "import yaml\nyaml.load('x', yaml.Loader)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "AutoTokenizer.from_pretrained('x')",
        "from urllib.request import urlopen",
        "eval('1')",
        "subprocess.run('x', shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(faults(ast.parse(source)))
