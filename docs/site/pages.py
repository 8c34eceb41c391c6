"""Which files are pages of the site, and where their links lead.

The site has the paths of the repository: README.md is its first page, docs/protocol.md is
docs/protocol/. Links between them are the relative links that also work in the repository. What a
page links to and is no page becomes one: a source file is shown as code, a directory as the list of
its files. A module of qkattn has a page of the reference instead, qkattn/config/setting/, which
is made from its docstrings.
"""

import functools
import json
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

import qkattn

ROOT = Path(__file__).parents[2]
# The packages of the reference, in the order of the navigation: from settings to reports.
ROOMS = ['config', 'attention', 'model', 'convert', 'decode', 'analysis', 'data', 'train', 'study']
ROOMS += ['verdict', 'report', 'stats', 'metrics', 'storage', 'jobs']
# A link of Markdown, with its address and its anchor.
LINK = re.compile(r'(?<=\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]*)?(?=\))')
# Files that are copied rather than shown as code.
COPIED = {'.png', '.svg', '.html', '.pdf'}


def on_config(config: MkDocsConfig) -> None:
    """Anchors are those of GitHub, and the navigation lists pages, modules and Markdown files."""
    config.mdx_configs['toc']['slugify'] = slugify(case='lower')
    claims = [f'docs/{path.name}' for path in sorted((ROOT / 'docs').glob('claims_*.md'))]
    documentation: list[Any] = ['docs/README.md']
    for title, name in re.findall(r'^\| \[(.+?)\]\((.+?)\)', _read('docs/README.md'), re.M):
        page = _page(f'docs/{name}')
        documentation.append({title: [page, *claims] if name == 'claims.md' else page})
    package = _package()
    rooms = [_navigation(package[room]) for room in [*ROOMS, 'errors']]
    missing = {member.name for member in _members(package)} - {*ROOMS, 'errors'}
    if missing:
        raise PluginError(f'ROOMS in docs/site/pages.py lacks {", ".join(missing)}')
    config.nav = [
        {'Home': 'README.md'},
        {'Documentation': documentation},
        {'Reference': ['qkattn/index.md', *rooms]},
        {'Contributing': 'CONTRIBUTING.md'},
        {'Changelog': 'CHANGELOG.md'},
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the pages in place of what `docs_dir` has: Markdown, the reference, linked files."""
    pages = {}
    texts = {name: _read(name) for name in ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md')}
    texts |= {f'docs/{path.name}': path.read_text('utf-8') for path in ROOT.glob('docs/*.md')}
    texts = {name: _with_lists(text) for name, text in texts.items()}
    texts |= {_page_of(module): _reference(module) for module in _modules(_package())}
    for name, text in list(texts.items()):
        for target, _ in LINK.findall(text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            if Path(path).suffix in COPIED:
                pages[path] = File(path, str(ROOT), config.site_dir, config.use_directory_urls)
            elif _page(path) not in texts and (ROOT / path).exists():
                texts[_page(path)] = _shown(path)
    for name, text in texts.items():
        pages[name] = File.generated(config, name, content=_linked(name, text))
    css = 'docs/site/site.css'
    pages[css] = File(css, str(ROOT), config.site_dir, config.use_directory_urls)
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *pages.values()])


def _read(name: str) -> str:
    return (ROOT / name).read_text('utf-8')


def _page(path: str) -> str:
    """Returns the page that shows a file of the repository: 'configs/small.py.md' for example."""
    if path.endswith('.md'):
        return path
    if path.startswith('qkattn/') and path.endswith('.py'):
        return path.removesuffix('.py').replace('__init__', 'index') + '.md'
    return f'{path}.md'


def _with_lists(text: str) -> str:
    """Returns Markdown with an empty line above each list, which GitHub does not need."""
    parts = re.split(r'(^```.*?^```)', text, flags=re.M | re.S)
    for index in range(0, len(parts), 2):  # what is between blocks of code
        parts[index] = re.sub(r'(?m)^(?![-|\s])(.+\n)(?=- )', r'\1\n', parts[index])
    return ''.join(parts)


def _linked(name: str, text: str) -> str:
    """Returns the text of a page, its links to files changed to links to their pages."""

    def changed(match: re.Match[str]) -> str:
        target, anchor = match.groups(default='')
        if Path(target).suffix not in COPIED:
            target = _page_beside(name, target)
        return target + anchor

    return LINK.sub(changed, text)


def _page_beside(name: str, target: str) -> str:
    folder = posixpath.dirname(name)
    page = _page(posixpath.normpath(posixpath.join(folder, target)))
    return posixpath.relpath(page, folder or '.')


def _shown(path: str) -> str:
    """Returns the page of a further file of the repository, or of a directory."""
    title = f'# {path}\n\n'
    if (ROOT / path).is_dir():
        command = ['git', 'ls-files', path]
        text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return f'{title}```text\n{text}```\n'
    text = _read(path)
    if path.endswith('.md'):
        return _with_lists(text)
    if path.endswith('.ipynb'):
        return _notebook(json.loads(text))
    return f'{title}````{Path(path).suffix[1:]}\n{text.rstrip()}\n````\n'


def _notebook(notebook: dict[str, Any]) -> str:
    """Returns the cells of a notebook as Markdown, each block of code above what it prints."""
    parts = []
    for cell in notebook['cells']:
        source = ''.join(cell['source'])
        parts.append(source if cell['cell_type'] == 'markdown' else f'```python\n{source}\n```')
        for output in cell.get('outputs', ()):
            data = output.get('data', {'text/plain': output.get('text')})
            if 'image/png' in data:
                image = ''.join(data['image/png']).replace('\n', '')
                parts.append(f'![figure](data:image/png;base64,{image})')
            else:
                parts.append(f'```text\n{"".join(data["text/plain"]).rstrip()}\n```')
    return '\n\n'.join(parts)


# The reference


@functools.cache
def _package() -> griffe.Module:
    """Returns the package qkattn with its docstrings. Nothing of it is imported."""
    extensions = griffe.load_extensions(str(Path(__file__).with_name('settings.py')))
    package = griffe.load('qkattn', search_paths=[ROOT], extensions=extensions)
    assert isinstance(package, griffe.Module)
    return package


def _modules(module: griffe.Module) -> list[griffe.Module]:
    """Returns a package and all public modules in it."""
    modules = [module]
    for member in _members(module):
        modules += _modules(member)
    return modules


def _members(package: griffe.Module) -> list[griffe.Module]:
    """Returns the public modules of a package, by name; none for a module."""
    members = [package[name] for name in sorted(package.modules)]
    # A name of an imported module is an alias of it.
    return [member for member in members if not member.is_alias and member.name[0] != '_']


def _page_of(module: griffe.Module) -> str:
    return _page(module.filepath.relative_to(ROOT).as_posix())


def _navigation(module: griffe.Module) -> dict[str, Any]:
    """Returns the entry of a module in the navigation; that of a package has its modules."""
    page = _page_of(module)
    if module.is_package or module.is_subpackage:
        return {module.name: [page, *map(_navigation, _members(module))]}
    return {module.name: page}


def _reference(module: griffe.Module) -> str:
    """Returns the page of a module. That of a package lists the names and modules in it."""
    if module.path == 'qkattn':
        names = {name: module[f'{_inside(home)}.{name}'] for name, home in qkattn._HOMES.items()}
        rooms = [module[room] for room in [*ROOMS, 'errors']]
        docstring = module.docstring.value
        tables = [_table('Names', names), _table('Packages', {m.path: m for m in rooms})]
        return '\n\n'.join(['# qkattn', docstring, *tables])
    entry = f'::: {module.path}'
    members = _members(module)
    if not members:
        return entry
    # What a package imports for its users is described where it is defined.
    names = [name for name, member in module.members.items() if member not in members]
    defined = [name for name in names if not module[name].is_alias and name[0] != '_']
    imported = {name: module[name] for name in _exports(module) if module[name].is_alias}
    parts = [f'{entry}\n    options: {{members: {json.dumps(defined) if defined else "false"}}}']
    if imported:
        parts.append(_table('Names', imported))
    parts.append(_table('Modules', {member.path: member for member in members}))
    return '\n\n'.join(parts)


def _exports(module: griffe.Module) -> list[str]:
    """Returns the names in `__all__` of a module, or those that it imports as themselves."""
    if module.exports is not None:
        return [str(name) for name in module.exports]
    return re.findall(r'^from .* import (\w+) as \1$', module.filepath.read_text('utf-8'), re.M)


def _inside(home: str) -> str:
    return home.removeprefix('qkattn.')


def _table(title: str, objects: dict[str, griffe.Object | griffe.Alias]) -> str:
    """Returns a table of links to objects, with the first sentence of each."""
    rows = [f'## {title}', '', '| name | what it is |', '|---|---|']
    for name, member in objects.items():
        path = member.final_target.path if isinstance(member, griffe.Alias) else member.path
        docstring = member.docstring
        line = docstring.value.partition('\n\n')[0] if docstring else ''
        line = line.replace('\n', ' ').replace('|', '\\|')
        rows.append(f'| [`{name}`][{path}] | {line} |')
    return '\n'.join(rows)
