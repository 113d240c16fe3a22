"""The page's server: this machine only, nothing foreign runs, errors in words; and the page as a folder."""

import http.client
import json
import shutil
import socket

import pytest

from calibadv_jax.contrib.pages.site import POLICY, RunFiles, Site, make_server, write_site
from calibadv_jax.core.errors import UserError


@pytest.fixture
def ask(served, small_run):
    """Answer of the server to a request: status, headers, body."""
    with served(small_run) as address:
        host = address.removeprefix("http://")

        def ask(path, method="GET", **headers):
            connection = http.client.HTTPConnection(host, timeout=20)
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, answer.headers, body

        yield ask


def test_every_answer_forbids_foreign_scripts(ask):
    for path in ("/", "/app.js", "/data/index.json", "/nothing"):
        _, headers, _ = ask(path)
        rules = headers["Content-Security-Policy"]
        assert "default-src 'none'" in rules and "script-src 'self';" in rules and "unsafe" not in rules
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_page_names_its_policy_itself_for_other_servers(ask):
    assert f'content="{POLICY}"' in ask("/")[2].decode()


def test_types_and_bodies(ask):
    for path, kind in (("/", "text/html"), ("/app.js", "text/javascript"), ("/style.css", "text/css")):
        status, headers, body = ask(path)
        assert status == 200 and headers["Content-Type"].startswith(kind) and body
    status, headers, body = ask("/data/group_1_0.json")
    assert headers["Content-Type"] == "application/json" and json.loads(body)["group"] == 0
    assert ask("/data/group_9_9.json")[0] == 404 and ask("/../../etc/passwd")[0] == 404


def test_head_has_no_body(ask):
    status, headers, body = ask("/", method="HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 0 and body == b""


def test_other_methods_are_refused(ask):
    assert ask("/", method="POST")[0] == 501


def test_foreign_name_that_points_here_is_refused(ask):
    assert ask("/data/index.json", Host="evil.example:80")[0] == 403
    assert ask("/data/index.json", Host="[")[0] == 403 and ask("/data/index.json", Host="")[0] == 403
    assert ask("/data/index.json", Host="[::1]:9")[0] == 200
    assert ask("/data/index.json", Host="localhost:9")[0] == 200  # through a tunnel the port differs


def test_it_listens_on_the_loopback_address_only(small_run):
    with make_server(Site(RunFiles(small_run)), 0) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_port_that_is_taken_is_named(small_run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}: .*choose another one with --port"):
            make_server(Site(RunFiles(small_run)), port)


def test_step_that_is_damaged_meanwhile_is_said(served, small_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    with served(folder) as address:
        (folder / "rollouts/step_1.parquet").write_bytes(b"PAR1")
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
        connection.request("GET", "/data/group_1_0.json")
        answer = connection.getresponse()
        assert answer.status == 500 and b"step_1.parquet: cannot be read" in answer.read()
        connection.close()


def test_folder_has_all_that_the_server_has(small_run, tmp_path):
    site = Site(RunFiles(small_run))
    number = write_site(site, tmp_path / "page")
    written = {
        str(p.relative_to(tmp_path / "page")): p for p in (tmp_path / "page").rglob("*") if p.is_file()
    }
    assert len(written) == number
    assert {name for name in written if name.startswith("data/group")} == {
        f"data/group_{step}_{group}.json" for step, group in ((1, 0), (1, 1), (2, 0))
    }
    assert all(path.read_bytes() == site.get(name) for name, path in written.items())


def test_writing_again_leaves_no_old_group(small_run, tmp_path):
    write_site(Site(RunFiles(small_run)), tmp_path / "page")
    write_site(Site(RunFiles(small_run, 2)), tmp_path / "page")
    assert [path.name for path in (tmp_path / "page/data").glob("group_*")] == ["group_2_0.json"]


def test_folder_with_other_things_is_left_alone(small_run, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds no such page"):
        write_site(Site(RunFiles(small_run)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
