"""What MkDocs makes of the repository beside the pages.

A page asks for it with a comment: `<!-- commands -->`, `<!-- families -->`,
`<!-- releases -->`, `<!-- imports: PACKAGE -->`, `<!-- errors: MODULE ... -->`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import command_help
import error_messages
import family_table
import import_graph
import social_card
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EDIT = "edit/main/docs/pages/"
MARKER = re.compile(r"<!-- (commands|families|releases|imports|errors)(?:: (.*?))? -->")
# A link from a page to a source file, which the site does not contain.
SOURCE_LINK = re.compile(r"\[(`\w+`)\]\((?:\.\./)+((?:fsdp_jax|bridge)/[\w/]+\.py)\)")


def on_config(config: MkDocsConfig) -> None:
    """Lists the notebooks among the tutorials, and says version and source."""
    config.edit_uri = EDIT if config.repo_url else None
    config.site_url = config.site_url or social_card.pages_url(config.repo_url)
    config.copyright = f"fsdp_jax {version()}, Apache-2.0"
    for entry in config.nav or ():
        if "Tutorials" in entry:
            entry["Tutorials"] += [f"notebooks/{path.name}" for path in NOTEBOOKS]


def version() -> str:
    """The version of the package, read from its source."""
    text = (ROOT / "fsdp_jax" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)
    assert found
    return found[1]


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds what lies elsewhere in the repository: the notebooks and two pages."""
    for path in NOTEBOOKS:
        name = path.relative_to(ROOT).as_posix()
        directories = {"src_dir": str(ROOT), "dest_dir": config.site_dir}
        files.append(File(name, use_directory_urls=True, **directories))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        page = File.generated(config, name.lower(), abs_src_path=str(ROOT / name))
        files.append(page)


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, **_: object
) -> str:
    """Puts what was asked for in the place of each comment."""
    if page.is_homepage and config.repo_url:
        markdown = markdown.replace("\n", f"\n\n{badges(config.repo_url)}\n", 1)
    # In the repository notebooks lie beside `docs`, on the site beside its pages.
    markdown = markdown.replace("../../notebooks/", "notebooks/")
    return MARKER.sub(_made, SOURCE_LINK.sub(r"\1 (`\2`)", markdown))


def on_page_context(context: object, *, page: Page, **_: object) -> None:
    """Lets notebooks be edited where they lie."""
    if page.edit_url and page.file.src_uri.startswith("notebooks/"):
        page.edit_url = page.edit_url.replace("docs/pages/", "", 1)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Says in each page's head what other sites show beside a link to it.

    Below the title of a notebook stands the badge that opens it in Colab.
    """
    if page.file.src_uri.startswith("notebooks/") and config.repo_url:
        badge = social_card.colab_badge(config.repo_url, page.file.src_uri)
        output = output.replace("</h1>", f"</h1>{badge}", 1)
    name, description = config.site_name, config.site_description or ""
    title = name if page.is_homepage else f"{page.title} - {name}"
    site, url = config.site_url, page.canonical_url or ""
    tags = social_card.tags(title, description, site=site, url=url)
    return output.replace("</head>", f"{tags}</head>", 1)


def badges(repository: str) -> str:
    """Badges of CI and of the newest release, for a repository on GitHub."""
    name = repository.removeprefix("https://github.com/").rstrip("/")
    ci = f"{repository}/actions/workflows/ci.yml"
    release = f"https://img.shields.io/github/v/release/{name}"
    return (
        f"[![CI]({ci}/badge.svg)]({ci}) [![Release]({release})]({repository}/releases)"
    )


def _made(found: re.Match[str]) -> str:
    kind, names = found[1], (found[2] or "").split()
    match kind:
        case "commands":
            return command_help.reference()
        case "families":
            return family_table.table()
        case "releases":
            return family_table.releases()
        case "imports":
            return imports(names[0])
        case _:
            return errors(names)


def imports(package: str) -> str:
    """The picture of a package's imports and a table of its parts."""
    graph = import_graph.import_graph(ROOT, package)
    texts = import_graph.summaries(ROOT, package)
    lines = ["| part | what it is | imports |", "|---|---|---|"]
    for name in sorted(graph):
        below = ", ".join(sorted(graph[name])) or "nothing of ours"
        lines.append(f"| `{name}` | {texts.get(name, '')} | {below} |")
    table = "\n".join(lines)
    return f"{import_graph.draw(graph, texts)}\n\n{table}"


def errors(patterns: Sequence[str]) -> str:
    """The messages of the modules that match, as a list."""
    lines = []
    for message in all_messages():
        if not error_messages.matches(message.module, patterns):
            continue
        lines.append(f"- **{message.error}** `` {message.text} `` ({message.module})")
    return "\n".join(lines)


@functools.cache
def all_messages() -> list[error_messages.Message]:
    """The messages that a user may see, of both packages."""
    return [
        message
        for package in ("fsdp_jax", "bridge")
        for message in error_messages.messages(ROOT, package)
        if message.text != error_messages.ELLIPSIS
    ]
