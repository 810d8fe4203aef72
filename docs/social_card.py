"""What other sites show of ours, or of a link: Open Graph tags, badges of Colab."""

from __future__ import annotations

import html
import re

PICTURE = "fsdp_jax_card.png"


def tags(title: str, description: str, *, site: str | None, url: str) -> str:
    """Returns the tags of a page's card, for its head.

    Args:
      title: Title of the page.
      description: Description of the site.
      site: Address of the site; None if it is not known, and the card then has no
        picture, which is named by its whole address.
      url: Address of the page; read if `site` is known.
    """
    of_page = {"og:type": "website", "og:title": title, "og:description": description}
    if site is not None:
        of_page["og:url"] = url
        of_page["og:image"] = f"{site.rstrip('/')}/{PICTURE}"
        of_page["twitter:card"] = "summary_large_image"
    return "".join(
        f'<meta property="{name}" content="{html.escape(value)}">\n'
        for name, value in of_page.items()
    )


def pages_url(repository: str | None) -> str | None:
    """Returns where GitHub serves the pages of a repository; None for others."""
    found = re.fullmatch(r"https://github\.com/([^/]+)/([^/]+?)/?", repository or "")
    return found and f"https://{found[1].lower()}.github.io/{found[2]}/"


def colab_badge(repository: str, notebook: str) -> str:
    """Returns HTML of the badge that opens a notebook of a GitHub repository."""
    name = repository.removeprefix("https://github.com/").rstrip("/")
    colab = "https://colab.research.google.com"
    image = f'<img src="{colab}/assets/colab-badge.svg" alt="Open in Colab">'
    url = f"{colab}/github/{name}/blob/main/{notebook}"
    return f'<p><a href="{url}">{image}</a></p>'
