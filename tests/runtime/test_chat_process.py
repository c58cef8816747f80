"""The process that renders chat templates: templates that mean harm, and its life."""

from __future__ import annotations

import os
import signal
import threading
from datetime import datetime, timedelta, timezone

import pytest
from tests.support.chat_templates import USER, made_templates

from teneral.runtime.errors import ModelError, RequestError
from teneral.runtime.text import chat as chat_module
from teneral.runtime.text.chat import (
    MAX_TEMPLATE_CHARS,
    ChatTemplate,
    ChatWorker,
)
from teneral.runtime.text.settings import TextSettings
from teneral.runtime.text.tokenizer import make_chat_template

# Templates that mean harm.

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def template():
    with made_templates() as make:
        yield make


GRAPH = """{% set ns = namespace(a=[1]) %}
{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}
{{ ns.a == ns.a[0] }}{{ ns.a }}"""


TOO_SLOW = {
    "loops": ENDLESS,
    "graph": GRAPH,
    "power": "{{ (messages | length + 2) ** (9 ** 9) }}",
    "constant power": "{{ 7 ** (9 ** 9) }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "generators": ENDLESS.replace("range(99999)", "range(99999) | map('string') | list"),
}


TOO_LARGE = {
    "product": "{{ range(99999) | map('string') | join('x' * 999) | replace('x', 'y' * 999) | urlize }}",
    "text": "{{ 'x' * 10 ** 9 }}",
    "range": "{{ range(10 ** 9) | list }}",
    "list": "{{ ([0] * 10 ** 9) | length }}",
    "width": "{{ '%1000000000d' % 3 }}",
    "format": "{{ '{:>1000000000}'.format(3) }}",
    "center": "{{ 'x' | center(10 ** 9) }}",
    "indent": "{{ 'x\\n\\nx' | indent(10 ** 9) }}",
    "growth": "{% set ns = namespace(a='x') %}{% for i in range(9) %}{% set ns.a = ns.a * 99 %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "[" * 500 + "]" * 500 + " }}",
    "lipsum": "{{ lipsum(n=10 ** 7) }}",
}


UNSAFE = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr": "{{ ('' | attr('__class__')).mro() }}",
    "item": "{{ messages['__class__']['__init__'] }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "globals": "{{ strftime_now.__globals__.os.system('true') }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
    "namespace set": "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "mutation": "{{ messages.append(1) }}",
    "self": "{{ self.__init__.__globals__ }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "file": "{{ open('/etc/passwd').read() }}",
}


@pytest.mark.parametrize("name", TOO_SLOW)
def test_a_template_that_takes_too_long_is_given_up(template, name):
    threads = set(threading.enumerate())  # others' threads may end meanwhile
    hostile = template(TOO_SLOW[name], max_render_s=0.4)
    hostile.start()
    process_id = hostile.process_id
    with pytest.raises((ModelError, RequestError)):
        hostile.render(USER)
    assert set(threading.enumerate()) <= threads
    assert hostile.process_id is None
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_template_that_takes_too_much_memory_is_given_up(template, name):
    with pytest.raises((ModelError, RequestError)):
        template(TOO_LARGE[name], max_render_s=1.0).render(USER)


@pytest.mark.parametrize("name", UNSAFE)
def test_a_template_cannot_leave_its_sandbox(template, name):
    with pytest.raises((ModelError, RequestError)):
        template(UNSAFE[name]).render(USER)


def test_a_prompt_that_grows_too_long_is_refused(template):
    growing = template(
        "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}", max_prompt_chars=5000
    )
    assert len(growing.render([{"role": "user", "content": "x" * 5}])) == 5000
    with pytest.raises(RequestError, match="longer than 5000 characters"):
        growing.render([{"role": "user", "content": "x" * 6}])


def test_after_giving_up_the_next_prompt_is_rendered(template):
    mixed = template("{% if messages | length > 1 %}" + ENDLESS + "{% endif %}fine", max_render_s=0.4)
    for _ in range(2):
        with pytest.raises(ModelError, match="exceeded its time limit"):
            mixed.render(USER * 2)
        assert mixed.render(USER) == "fine"


@pytest.mark.parametrize("text", ["{% for %}", "{{ 1 | no_such_filter }}", "{% nonsense %}", "{{"])
def test_a_template_with_a_wrong_syntax_is_refused_every_time(template, text):
    broken = template(text)
    for _ in range(2):
        with pytest.raises(ModelError, match="is invalid"):
            broken.render(USER)


def test_a_template_that_is_too_long_is_refused_unread():
    with pytest.raises(ModelError, match="longer than"):
        ChatTemplate({"default": "x" * (MAX_TEMPLATE_CHARS + 1)}, {})


# The process.


def test_the_process_has_no_environment_and_may_write_no_file(template, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    one = template("x")
    one.render(USER)
    with open(f"/proc/{one.process_id}/environ", "rb") as file:
        assert b"secret" not in file.read()
    with open(f"/proc/{one.process_id}/limits") as file:
        limits = {line[:26].strip(): line[26:].split()[0] for line in file}
    assert limits["Max file size"] == "0"
    assert limits["Max address space"] != "unlimited"
    assert limits["Max cpu time"] != "unlimited"


def test_a_process_that_was_killed_is_replaced(template):
    one = template("fine")
    one.render(USER)
    first = one.process_id
    os.kill(first, 9)
    with pytest.raises(ModelError, match="ended"):
        one.render(USER)
    assert one.render(USER) == "fine"
    assert one.process_id != first


def test_a_time_limit_counts_what_the_process_computes(template):
    """Not the time for which the machine, or who stopped it, lets the process wait."""
    one = template("{{ messages[0].content }}", max_render_s=0.2)
    one.render(USER)
    os.kill(one.process_id, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (one.process_id, signal.SIGCONT)).start()
    assert one.render(USER) == USER[0]["content"]


def test_a_process_that_stays_stopped_is_given_up(template, monkeypatch):
    monkeypatch.setattr(chat_module, "MAX_WAIT_S", 0.5)
    one = template("fine", max_render_s=0.2)
    one.render(USER)
    os.kill(one.process_id, signal.SIGSTOP)
    with pytest.raises(ModelError, match="exceeded its time limit"):
        one.render(USER)
    assert one.render(USER) == "fine"


def test_closing_ends_the_process_and_rendering_starts_another(template):
    one = template("fine")
    one.start()
    first = one.process_id
    one.close()
    assert one.process_id is None
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert one.render(USER) == "fine"


def test_an_unreferenced_template_ends_its_process():
    one = ChatTemplate({"default": "fine"}, {})
    one.render(USER)
    process_id = one.process_id
    del one
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_a_process_that_waits_is_taken_over():
    worker = ChatWorker()
    one = ChatTemplate({"default": "fine"}, {}, worker=worker)
    assert one.render(USER) == "fine"
    assert one.process_id == worker.process.pid
    with open(f"/proc/{one.process_id}/limits") as file:
        assert "Max address space         unlimited" not in file.read()
    one.close()
    assert worker.process.poll() is not None
    assert one.render(USER) == "fine"
    one.close()


def test_one_that_waited_and_died_is_replaced():
    worker = ChatWorker()
    worker.process.kill()
    worker.process.wait()
    one = ChatTemplate({"default": "fine"}, {}, worker=worker)
    one.start()
    assert one.render(USER) == "fine"
    assert one.process_id != worker.process.pid
    one.close()


def test_one_that_waits_ends_with_a_template_that_did_not_need_it():
    worker = ChatWorker()
    ChatTemplate({"default": "fine"}, {}, worker=worker).close()
    assert worker.process.poll() is not None


def test_one_that_waits_ends_where_the_model_has_no_template():
    worker = ChatWorker()
    settings = TextSettings.read({"tokenizer_config.json": b"{}"}.get)
    template = make_chat_template(settings, worker)
    assert worker.process.poll() is not None
    with pytest.raises(RequestError, match="no chat template"):
        template.render(USER)


def test_the_time_is_that_of_the_server_s_client(monkeypatch):
    """Not where the process that waited was started."""
    monkeypatch.setenv("TZ", "UTC+3")
    worker = ChatWorker()
    monkeypatch.setenv("TZ", "ABC-5")  # east of Greenwich
    one = ChatTemplate({"default": "{{ strftime_now('%d %H') }}"}, {}, worker=worker)
    there = timezone(timedelta(hours=5))
    before = datetime.now(there)
    rendered = one.render(USER)
    assert rendered in [when.strftime("%d %H") for when in (before, datetime.now(there))]
    one.close()


def test_many_threads_share_one_process(template):
    echo = template("{{ messages[0].content }}")
    echo.start()
    texts = [f"text {number} " * 500 for number in range(24)]
    answers = {}

    def ask(text):
        answers[text] = echo.render([{"role": "user", "content": text}])

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {text: text for text in texts}


def test_a_python_that_cannot_be_started_is_an_error(template, monkeypatch):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    one = template("fine")
    one.start()  # logs nothing: perhaps no chat will come
    with pytest.raises(ModelError, match="could not be started"):
        one.render(USER)
