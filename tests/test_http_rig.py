"""The tests' own web servers: what they say of a request that fails, and what not."""

import socket
import threading

from http_rig import Handler, serving


def sent(url):
    """Its request is sent, and nobody waits for the reply."""
    client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    client.sendall(b"GET / HTTP/1.0\r\n\r\n")
    return client


def test_a_client_that_leaves_is_no_news_and_a_fault_is_told(capfd):
    class Large(Handler):
        def do_GET(self):
            while True:  # until the client is seen to be gone
                self.reply(200, b"x" * 2**20)

    class Faulty(Handler):
        def do_GET(self):
            raise ValueError("a fault of the test")

    with serving(Large) as url:
        with sent(url) as client:
            assert client.recv(1)
        server = [thread for thread in threading.enumerate() if "process_request" in thread.name]
        for thread in server:
            thread.join(60)
    assert capfd.readouterr().err == ""
    with serving(Faulty) as url, sent(url) as client:
        assert client.recv(1) == b""  # it has ended
    assert "ValueError: a fault of the test" in capfd.readouterr().err
