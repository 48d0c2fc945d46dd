"""README and docs/: the generated page, the links, and that quoted code exists."""

from __future__ import annotations

import builtins
import inspect
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

from jupyter_disttrain import CellRun, Cluster, errors
from jupyter_disttrain.cli import _parser as command_parser
from jupyter_disttrain.notebook import extension  # noqa: F401  (defines the magics)
from jupyter_disttrain.notebook.magics.arguments import PARSERS
from jupyter_disttrain.notebook.magics.settings import DistributedMagics

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
README_BYTES = 10_000

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```[\s\S]*?^```$|(?:^ {4,}.*\n)+", re.MULTILINE)
_MAGIC = re.compile(r"^\s*%{1,2}(dist_\w+|distributed|rank|sync)\b(.*)$")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Terms of the field, where one of these is quoted.
_MANNERED = re.compile(r"\b(a person|person's|told|said|says|anew|heeds?|whoever|nobody|words|hears?)\b", re.IGNORECASE)
# Options of other programs: sbatch, srun, mpirun, torchrun, docker and git.
_FOREIGN = {
    *("--qos", "--mem", "--exclusive", "--exclude", "--export", "--nodelist", "--gpus-per-task", "--kill-on-bad-exit"),
    *("--output", "--wait", "--mpi", "--host", "--map-by", "--bind-to", "--with-ft", "--continuous", "--mca"),
    *("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--ipc", "--shm-size"),
    *("--runtime-dir", "--data-dir"),
}
# Parts of messages that the pages quote, as in the code.
QUOTED = (
    "ranks are waiting; an interrupt ends the wait and keeps all variables",
    " is slower than the others: it ",
    " left in this loop",
    ", importing torch",
    " waited for ",
    "RankDied",
    "MPI has no world of all ranks",
    " can't be used as requested, so nothing was started",
    " there, here it is ",
    "torch and MPI use arbitrary ports between hosts: open them in the firewall",
    " is pending: ",
    "expected to start ",
    " from now",
    "read once",
    "not responding",
    "more columns",
)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        found.add(next(name for name in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if name not in found))
    return found


def code_of(page: Path) -> list[str]:
    """Return the code of a page: each span in backticks, and each line of a block."""
    text = page.read_text()
    blocks = [line for block in _FENCE.findall(text) for line in block.splitlines()]
    return [*blocks, *re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))]


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_readme_is_short() -> None:
    assert len(PAGES[0].read_bytes()) <= README_BYTES


def test_readme_on_pypi_has_no_broken_links() -> None:
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"][
        "fancy-pypi-readme"
    ]
    text = PAGES[0].read_text()
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert hook["fragments"] == [{"path": "README.md"}]
    assert [target for target in _LINK.findall(text) if not target.startswith("https:")] == []
    assert "![" not in text


def test_architecture_page_lists_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"`(\w+)/`", text))
    assert {path.parent.name for path in (ROOT / "jupyter_disttrain").glob("*/__init__.py")} <= listed


def test_page_of_magics_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "magics_page.py"))
    assert script["PAGE"].read_text() == script["page"](), "run scripts/magics_page.py"


def test_every_link_has_a_target(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_link_that_shows_a_file_name_leads_to_that_file(page: Path) -> None:
    for text, target in re.findall(r"\[`?([\w./-]+\.py)`?\]\(([^)\s]+)\)", page.read_text()):
        assert target.endswith(text.rpartition("/")[2]), (text, target)


def test_readme_links_every_page_of_docs() -> None:
    linked = set(_LINK.findall(PAGES[0].read_text()))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= linked


def test_quoted_magics_have_the_quoted_options(page: Path) -> None:
    for line in code_of(page):
        found = _MAGIC.match(line)
        if found is None:
            continue
        name, rest = found.groups()
        assert name in PARSERS, line
        own = {option for action in PARSERS[name]._actions for option in action.option_strings}
        if name != "dist_run":  # what follows the script's name belongs to the script
            assert set(_OPTION.findall(rest)) <= own | _FOREIGN, line
            assert {word for word in _arguments(rest) if re.fullmatch("-[a-zA-Z]", word)} <= own, line


def _arguments(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return []  # an ellipsis or a bracket of a synopsis


def test_quoted_options_commands_and_settings_exist(page: Path) -> None:
    commands = next(action.choices for action in command_parser()._actions if action.choices)
    parsers = [*PARSERS.values(), command_parser(), *commands.values()]
    options = {option for each in parsers for action in each._actions for option in action.option_strings}
    options |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / "jupyter_disttrain/rank/startup/startup_args.py").read_text()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py")}
    modules |= {name.removesuffix(".__main__") for name in modules}
    traits = DistributedMagics.class_trait_names(config=True)
    for code in code_of(page):
        if re.match("(--|-m jupyter|python -m jupyter|jupyter disttrain)", code):
            assert set(_OPTION.findall(code)) <= options | _FOREIGN, code
        assert set(re.findall(r"(?<![\w-])make ([a-z-]+)", code)) <= targets, code
        assert set(re.findall(r"jupyter disttrain ([a-z-]+)", code)) <= set(commands), code
        assert set(re.findall(r"-m (benchmarks[.\w]*)", code)) <= modules, code
        assert set(re.findall(r"DistributedMagics\.(\w+)", code)) <= set(traits), code


@pytest.mark.parametrize(("title", "kind"), [("Cluster", Cluster), ("CellRun", CellRun)])
def test_documented_python_api_is_that_of_the_code(title: str, kind: type) -> None:
    section = (ROOT / "docs" / "python_api.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    named = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    for path, arguments in re.findall(r"`([\w.]+)(?:\(([^`]*)\))?`", " ".join(named)):
        *features, name = path.split(".")
        owner = _feature(kind, features[0]) if features else kind
        attributes = set(dir(owner)) | set(re.findall(r"self\.(\w+)", inspect.getsource(owner)))
        assert name in attributes, path
        parameters = [part.partition("=")[0].strip() for part in arguments.split(",") if part]
        assert not parameters or set(parameters) <= _parameters(getattr(owner, name)), path


def _feature(kind: type, name: str) -> type:
    """Return the type of a property."""
    getter = getattr(kind, name).fget
    found: type = getattr(sys.modules[kind.__module__], getter.__annotations__["return"])
    return found


def _parameters(function: Callable[..., object]) -> set[str]:
    own = inspect.signature(function).parameters
    rules = {"grace_s", "hang_after_s", "on_rank_death"} if "rules" in own else set()
    return set(own) | rules


def test_documented_errors_are_those_of_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+Error|RankFailure)` \| (?:`(\w+)` )?\|", (ROOT / "docs" / "python_api.md").read_text(), re.MULTILINE
    )
    assert rows
    for name, base in rows:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.DisttrainError)
        assert not base or issubclass(kind, getattr(builtins, base)), name


def test_quoted_messages_are_those_of_the_code() -> None:
    pages = " ".join(" ".join(page.read_text().split()) for page in PAGES)
    sources = [*(ROOT / "jupyter_disttrain").rglob("*.py"), *(ROOT / "labextension" / "src").rglob("*.ts")]
    code = "\n".join(path.read_text() for path in sources)
    assert [text for text in QUOTED if text not in pages or text not in code] == []


def test_plain_english(page: Path) -> None:
    prose = re.sub(r"`[^`\n]+`", "", _FENCE.sub("", page.read_text()))
    assert not _MANNERED.findall(prose)
