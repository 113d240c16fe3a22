"""The run's date in chat templates, as transformers renders them."""

from copy import deepcopy
from datetime import datetime

import pytest

from calibadv_jax.protocols.template_date import fix_date

MAY = datetime(2026, 5, 1)


@pytest.fixture
def render(byte_tokenizer):
    def render(template, date_string="2026-05-01"):
        tokenizer = deepcopy(byte_tokenizer)
        tokenizer.chat_template = template
        dated, variables = fix_date(template, date_string)
        message = {"role": "user", "content": "Who?"}
        return tokenizer.apply_chat_template([message], chat_template=dated, tokenize=False, **variables)

    return render


def written(date_format):
    return "{{ strftime_now('" + date_format + "') }}"


@pytest.mark.parametrize(
    "date_format",
    [
        "%d %b %Y",
        "%A, %B %d %Y",
        "%-d/%-m/%y",
        "%Y-%m-%dT%H:%M:%S",
        "%I:%M %p",
        "%F %T",
        "%j %U %W %u %w %a %G",
    ],
)
def test_formats_are_those_of_strftime(render, date_format):
    assert render(written(date_format)) == MAY.strftime(date_format)


def test_doubled_percent_sign_is_one(render):
    assert render(written("100%% %%d %d%%")) == "100% %d 01%"


def test_format_may_be_a_variable(render):
    assert render("{% set wanted = '%Y' ~ '/' ~ '%m' %}{{ strftime_now(wanted) }}") == "2026/05"


@pytest.mark.parametrize("beginning", ["\n", "  \n x", "\n\n"])
def test_the_templates_own_beginning_stays(render, beginning):
    assert render(beginning + written("%Y")) == render(beginning + "2026")


def test_template_without_a_date_is_unchanged():
    template = "{{ messages[0].content }}"
    assert fix_date(template, "Friday") == (template, {"date_string": "Friday"})


def test_name_that_is_only_tested_calls_nothing(render):
    template = "{% if strftime_now is defined %}{{ date_string }}{% endif %}"
    assert render(template, "Friday") == "Friday"
