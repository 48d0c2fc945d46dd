"""Which starts share a warm process."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.protocol.environment import CLIENT, PRELOAD
from jupyter_disttrain.rank.warm.start_label import import_environment, label_of

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = {"HOME": "/home/user", "PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": "/opt/lib"}


@pytest.mark.parametrize(
    "more",
    [
        {CLIENT: "default-1-abcdef"},
        {"RANK": "3", "MASTER_ADDR": "node1", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "SLURM_PROCID": "3"},
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"TORCHELASTIC_RUN_ID": "none"},
        {"MY_VARIABLE": "1"},
        {"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_user", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_variables_that_no_library_reads_when_it_is_imported_make_no_difference(more: dict[str, str]) -> None:
    assert label_of(PLAIN | more) == label_of(PLAIN)


def test_folder_that_mpiexec_adds_for_its_libraries_makes_no_difference(tmp_path: Path) -> None:
    plain = {name: value for name, value in PLAIN.items() if name != "LD_LIBRARY_PATH"}
    link = tmp_path / "environment"
    link.symlink_to(sys.prefix)
    for folder in (sys.prefix, link):
        libraries = {"LD_LIBRARY_PATH": f"{folder}/lib:{folder}/lib"}
        for user in ({}, {PRELOAD: "json"}, {"LD_LIBRARY_PATH": f"/opt/lib:{folder}/lib"}):
            label = label_of(import_environment(plain | user, "."))
            path = ":".join([libraries["LD_LIBRARY_PATH"], *filter(None, [user.get("LD_LIBRARY_PATH")])])
            added = {"LD_LIBRARY_PATH": path, "OPAL_PREFIX": str(folder), "PMIX_RANK": "0"}
            assert label_of(import_environment(plain | user | added, ".")) == label
        # Set by the user, it selects other libraries.
        assert label_of(import_environment(plain | libraries, ".")) != label_of(import_environment(plain, "."))


@pytest.mark.parametrize(
    "more",
    [
        {"OMP_NUM_THREADS": "2"},
        {"LD_LIBRARY_PATH": "/opt/cuda/lib:/opt/lib"},
        {"PYTHONPATH": "/home/user/modules"},
        {"TORCH_LOGS": "+dynamo"},
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"LANG": "de_DE.UTF-8"},
        {PRELOAD: "json"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_variables_that_libraries_read_make_a_difference(more: dict[str, str]) -> None:
    assert label_of(PLAIN | more) != label_of(PLAIN)


def test_any_variable_makes_a_difference_to_preloaded_modules() -> None:
    preloading = PLAIN | {PRELOAD: "json"}
    assert label_of(preloading | {"HF_HOME": "/data"}) != label_of(preloading)
    assert label_of(preloading | {"RANK": "3", "JPY_SESSION_NAME": "a.ipynb"}) == label_of(preloading)


def test_preloaded_module_that_changed_makes_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "preloaded_package"
    package.mkdir()
    (package / "__init__.py").touch()
    part = package / "part.py"
    part.touch()
    monkeypatch.syspath_prepend(tmp_path)
    environment = PLAIN | {PRELOAD: "preloaded_package.part"}
    before = label_of(environment)
    assert label_of(environment) == before
    os.utime(part, (2_000_000_000, 2_000_000_000))
    assert label_of(environment) != before


def test_module_that_does_not_exist_has_a_label() -> None:
    assert label_of(PLAIN | {PRELOAD: "no_such_module.part"})


def test_import_environment_has_no_rank_and_no_cluster() -> None:
    of_rank = {CLIENT: "default-1-abcdef", "OMPI_COMM_WORLD_RANK": "3", "PMIX_NAMESPACE": "prterun-1", "PMI_RANK": "3"}
    assert import_environment(PLAIN | of_rank | {PRELOAD: "json"}, "/work") == PLAIN | {PRELOAD: "json"}


def test_relative_paths_of_modules_are_those_of_the_start() -> None:
    found = import_environment(PLAIN | {"PYTHONPATH": "src:/opt/lib::../other"}, "/work/run")
    assert found["PYTHONPATH"] == "/work/run/src:/opt/lib:/work/run:/work/other"


def test_change_of_a_file_of_a_preloaded_package_makes_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "mine" / "part"
    part.mkdir(parents=True)
    for file in (part.parent / "__init__.py", part / "module.py", part / "data.txt"):
        file.touch()
    (part / "gone.py").symlink_to(tmp_path / "nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    before = label_of(PLAIN | {PRELOAD: "mine"})
    later = 2 * (part.stat().st_mtime + 10,)
    os.utime(part / "data.txt", later)
    assert label_of(PLAIN | {PRELOAD: "mine"}) == before
    os.utime(part / "module.py", later)
    assert label_of(PLAIN | {PRELOAD: "mine"}) != before
    assert label_of(PLAIN | {PRELOAD: "json"}) != before
