"""Tables of committed benchmarks in Markdown pages."""

import fnmatch
import re
from pathlib import Path

from qkattn.benchmark import session, targets
from qkattn.benchmark.summary import brief
from qkattn.errors import ReportError
from qkattn.run.files import write_atomic

BLOCK = re.compile(r'(<!-- benchmark: (\S+) \| (.+?) -->\n)(.*?)(<!-- end -->)', re.DOTALL)
TARGETS = 'targets'


def check_page(path: str | Path, *, write: bool = False) -> int:
    """Checks the tables of benchmarks in a page and returns how many blocks of them there are.

    A block stands between `<!-- benchmark: DIRECTORY | PATTERN -->` (relative to the page) and
    `<!-- end -->`: the tables of the groups whose names, 'SUITE: TITLE', match the pattern, or the
    list of targets for 'targets'. It is empty where the directory does not exist.

    Args:
      write: replaces the blocks by what the benchmarks give.

    Raises:
      ReportError: a block that its benchmark does not give.
    """
    path = Path(path)
    text = path.read_text('utf-8')
    expected = BLOCK.sub(lambda m: f'{m[1]}{_block(path.parent / m[2], m[3])}{m[5]}', text)
    if write and expected != text:
        write_atomic(path, expected)
    elif expected != text:
        raise ReportError(
            f'{path} has other tables than its benchmarks give; python -m experiments.verify '
            '--write writes them'
        )
    return len(BLOCK.findall(text))


def _block(directory: Path, pattern: str) -> str:
    if not directory.is_dir():
        return ''
    document = session.read(directory)
    groups = session.groups_of(document)
    if pattern == TARGETS:
        lines = targets.lines(groups, bool(document['machine']['accelerators']))
        return '\n'.join(f'- {line}' for line in lines) + '\n'
    matching = [group for group in groups if fnmatch.fnmatch(group.name, pattern)]
    if not matching:
        raise ReportError(f'{directory} has no group that matches {pattern!r}')
    return '\n\n'.join(map(brief, matching)) + '\n'
