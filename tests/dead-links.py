#!/usr/bin/env python3
"""Fails if a page that `cargo doc` made has a link to a page or an anchor that is not there.

dead-links.py DOC CRATE ..   DOC: the folder, as target/doc. Links to the web are not followed.
"""

import html
import os
import re
import sys
from urllib.parse import unquote, urldefrag

# Of tracing's documentation, which is shown where its traits are implemented.
FOREIGN = {
    "super::Span::current()",
    "crate::Span",
    "super::Subscriber",
    "dispatcher#setting-the-default-subscriber",
}


# The methods of another crate's type, which a type shows because it derefs to that. rustdoc links from there to the private module
# of what is re-exported.
BY_DEREF = re.compile(r'id="deref-methods-.*?(?=id="trait-implementations")', re.DOTALL)


class Pages(dict):
    """The text of each page."""

    def __missing__(self, path):
        with open(path, encoding="utf-8") as page:
            self[path] = page.read()
        return self[path]


class Anchors(dict):
    """The anchors of each page."""

    def __missing__(self, path):
        ids = re.findall(r'\bid="([^"]+)"', PAGES[path])
        self[path] = {html.unescape(one) for one in ids}
        return self[path]


PAGES = Pages()
ANCHORS = Anchors()


def is_dead(page, link):
    url, anchor = urldefrag(link)
    there = os.path.normpath(os.path.join(os.path.dirname(page), unquote(url))) if url else page
    if os.path.isdir(there):
        there = os.path.join(there, "index.html")
    if not os.path.exists(there):
        return True
    # rustdoc writes a space as %20 or +
    forms = {anchor, unquote(anchor), unquote(anchor).replace("+", " ")}
    return bool(anchor) and "/src/" not in there and not forms & ANCHORS[there]


def main(doc, *crates):
    pages = [
        os.path.join(folder, file)
        for crate in crates
        for folder, _, files in os.walk(os.path.join(doc, crate))
        for file in files
        if file.endswith(".html")
    ]
    links, dead = 0, []
    for page in sorted(pages):
        text = BY_DEREF.sub("", PAGES[page])
        for link in map(html.unescape, re.findall(r'<a [^>]*?href="([^"]+)"', text)):
            if link in FOREIGN or link.startswith(("http:", "https:", "javascript:", "data:")):
                continue
            links += 1
            if is_dead(page, link):
                dead.append(f"{os.path.relpath(page, doc)}: {link}")
    print(f"{len(pages)} pages, {links} links, {len(dead)} dead", *dead, sep="\n")
    without = [crate for crate in crates if not os.path.isdir(os.path.join(doc, crate))]
    if without or dead:
        sys.exit(f"no pages: {without}" if without else 1)


main(*sys.argv[1:])
