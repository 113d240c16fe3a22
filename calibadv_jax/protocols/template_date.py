"""The date that a chat template shows: the run's own, where transformers would give today's."""

from __future__ import annotations

from datetime import datetime
from typing import Any

# The date of templates without a run.
DEFAULT_DATE = "26 Jul 2024"
# Forms of prompt.date_string that a chat template can write in a form of its own.
DATE_FORMATS = ("%d %b %Y", "%d %B %Y", "%Y-%m-%d", "%B %d, %Y", "%b %d, %Y")
# What stands for a part of a date in a format of strftime, without its percent sign. A hyphen leaves out the
# leading zero.
_DIRECTIVES = tuple("aAbBcCdDeFgGhHIjmMnprRStTuUVwWxXyYzZ") + ("-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y")
_PARTS = "calibadv_date_parts"
_COMPLAINT = "calibadv_date_complaint"
# Written before a template, this takes the place of transformers' strftime_now. It is a macro, and no
# function among the template's variables, since newer versions of transformers (5.24) hand only plain data
# to it. The plus keeps a line break at the template's own beginning.
_STRFTIME_NOW = (
    "{%- macro strftime_now(date_format) -%}"
    f"{{%- if not {_PARTS} -%}}"
    f"{{{{- raise_exception({_COMPLAINT} ~ date_format) -}}}}"
    "{%- endif -%}"
    "{%- for text in date_format.split('%%') -%}"
    "{%- set written = namespace(text=text) -%}"
    f"{{%- for directive, part in {_PARTS}.items() if directive in text -%}}"
    "{%- set written.text = written.text.replace(directive, part) -%}"
    "{%- endfor -%}"
    "{{- '' if loop.first else '%' -}}{{- written.text -}}"
    "{%- endfor -%}"
    "{%- endmacro +%}"
)


def fix_date(template: str, date_string: str) -> tuple[str, dict[str, Any]]:
    """Return a chat template that shows the run's date, and the variables that it needs.

    Templates take the date from the variable date_string, or call strftime_now, which transformers defines as
    today's: a run over midnight would change its prompt, and a replay would see another one.

    Args:
        template: the text of a chat template.
        date_string: prompt.date_string. Where it has none of DATE_FORMATS, a template that calls strftime_now
            raises an error that says so.

    Returns:
        The template, in which strftime_now writes midnight of that date, and the arguments of
        `apply_chat_template` that go with it.
    """
    variables: dict[str, Any] = {"date_string": date_string}
    if "strftime_now" not in template:
        return template, variables
    date = _read_date(date_string)
    variables[_PARTS] = {f"%{name}": date.strftime(f"%{name}") for name in _DIRECTIVES} if date else {}
    variables[_COMPLAINT] = (
        f"prompt.date_string is {date_string!r}: give a date such as 26 Jul 2024 or 2024-07-26, since the"
        " template writes it as "
    )
    return _STRFTIME_NOW + template, variables


def _read_date(text: str) -> datetime | None:
    """Return midnight of the date, or None where the text is no date."""
    for known_format in DATE_FORMATS:
        try:
            return datetime.strptime(text, known_format)
        except ValueError:
            continue
    return None
