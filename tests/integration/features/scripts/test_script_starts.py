"""What a script finds when it starts: as under Python itself."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from .test_scripts import lines_of, write

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster


def test_flags_and_streams_are_those_of_python(either: Cluster, folder: Path) -> None:
    code = """
        import subprocess, sys
        print(sys.flags.safe_path if sys.version_info >= (3, 11) else False, sys.path[0])
        print(subprocess._args_from_interpreter_flags())
        print([each.mode for each in (sys.stdin, sys.stdout, sys.stderr)], sys.stdin.encoding)
        """
    write(folder, "show.py", code)
    alone = subprocess.run([sys.executable, "-u", "show.py"], cwd=folder, capture_output=True, text=True, check=True)
    assert either.scripts.run("show.py", ranks=0).stdout == {0: alone.stdout}


def test_package_is_imported_from_its_installation_whatever_lies_beside_the_script(
    either: Cluster, folder: Path
) -> None:
    for name in ("jupyter_disttrain", "psutil", "typing", "code"):
        write(folder, f"{name}.py", f"kind = 'own {name}'")
    write(folder, "uses.py", "import code, psutil, typing\nprint(code.kind, psutil.kind, typing.kind)")
    assert either.scripts.run("uses.py", ranks=0).stdout == {0: "own code own psutil own typing\n"}


@pytest.mark.parametrize(
    "change",
    ["sys.path.insert(0, lib)", "sys.path[0:0] = [lib]", "sys.path[0] = lib", "sys.path = [lib] + sys.path"],
)
def test_modules_in_a_folder_that_the_script_puts_first_are_taken(cluster: Cluster, folder: Path, change: str) -> None:
    write(folder, "lib/numpy/__init__.py", "from .part import kind")
    write(folder, "lib/numpy/part.py", "kind = 'own numpy'")
    write(folder, "lib/code.py", "kind = 'own code'")
    begin = f"import os, sys; lib = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib'); {change}\n"
    write(folder, "uses.py", begin + "import numpy, code; print(numpy.kind, code.kind)")
    assert cluster.scripts.run("uses.py", ranks=0).stdout == {0: "own numpy own code\n"}
    write(folder, "uses.py", begin.replace(change, "sys.path.append(lib)") + "import numpy; print(numpy.ones(1))")
    assert cluster.scripts.run("uses.py", ranks=0).stdout == {0: "[1.]\n"}


def test_folder_that_holds_the_modules_already_replaces_none(cluster: Cluster, folder: Path) -> None:
    """And neither does a folder replace what the script has imported from it."""
    code = """
        import os, site, sys
        import code
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        for each in site.getsitepackages(): sys.path.insert(0, each)
        import code as again, numpy, torch
        print(again is code, code.kind, torch.ones(1).numpy())
        """
    write(folder, "code.py", "kind = 'own code'")
    assert cluster.scripts.run(write(folder, "uses.py", code), ranks=0).stdout == {0: "True own code [1.]\n"}


def test_search_path_is_a_list_for_other_processes(cluster: Cluster, folder: Path) -> None:
    code = "import copy, pickle, sys\nprint(isinstance(sys.path, list), type(copy.copy(sys.path)), "
    code += "type(pickle.loads(pickle.dumps(sys.path))))"
    run = cluster.scripts.run(write(folder, "copies.py", code), ranks=0)
    assert run.stdout == {0: "True <class 'list'> <class 'list'>\n"}


def test_variables_that_torch_reads_when_it_is_imported_may_be_set_before(cluster: Cluster, folder: Path) -> None:
    code = """
        import os
        os.environ["OMP_NUM_THREADS"] = "2"
        os.environ.update({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
        import torch, torch.distributed as dist
        print(torch.get_num_threads(), dist.get_debug_level().name)
        """
    first = cluster.scripts.run(write(folder, "sets.py", code))
    assert lines_of(first) == {rank: ["2 DETAIL"] for rank in range(2)}
    assert first.stderr[0] == first.stderr[1]
    assert first.stderr[0].startswith("sets.py starts in a new Python, because it sets ")
    assert "OMP_NUM_THREADS and TORCH_DISTRIBUTED_DEBUG" in first.stderr[0]
    again = cluster.scripts.run("sets.py", ranks=0)
    assert (again.stdout[0], again.stderr) == ("2 DETAIL\n", {0: ""}), "the reason is given once"


def test_script_whose_variables_change_nothing_is_forked(cluster: Cluster, folder: Path) -> None:
    code = """
        import os
        os.environ.setdefault("OMP_NUM_THREADS", "7")  # it is set
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # not read by torch
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # read when CUDA is initialized
        import torch
        os.environ["TORCH_LOGS"] = "recompiles"  # too late under Python, too
        print(os.getppid())
        """
    pids = cluster.run("import os; [os.environ['OMP_NUM_THREADS'] != '7', os.getppid()]").results
    assert all(differs for differs, _ in pids.values())
    forked = cluster.scripts.run(write(folder, "plain.py", "import os; print(os.getppid())"))
    assert cluster.scripts.run(write(folder, "sets.py", code)).stdout == forked.stdout
