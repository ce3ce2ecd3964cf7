"""Makes docs/server-options.md from the class of the server's settings.

    python tools/make_server_options.py
"""

from __future__ import annotations

from pathlib import Path

from gemmakv.cli.flags import flag_of, help_of
from gemmakv.cli.serve_settings import PREFIX, ServeSettings

PAGE = Path(__file__).parents[1] / "docs" / "server-options.md"
HEAD = """\
# Options of the server

Made by `tools/make_server_options.py` from the class that `gemmakv serve` reads
its options with.

Each is a flag, a variable and a key of the TOML file of `--config` (the flag's
name without dashes in front, `port = 8080`). A flag takes precedence over a
variable, and that over the file. Several values are a flag given several times,
a variable with spaces between them, or a list in the file. A switch is a flag
without a value, and `true` or `false` elsewhere.

| flag | variable | |
|---|---|---|
"""


def page() -> str:
    """Gives the text of the page."""
    rows = []
    for name, field in ServeSettings.model_fields.items():
        extra = field.json_schema_extra
        value = f" {extra['metavar']}" if isinstance(extra, dict) else ""
        flag = f"`{flag_of(name)}{value}`".replace("|", "\\|")
        text = help_of(field).replace("*.", "\\*.")
        rows.append(f"| {flag} | `{PREFIX}{name.upper()}` | {text} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
