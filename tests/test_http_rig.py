"""The tests' own web servers: they report a fault of a test, and not a client that leaves."""

import socket
import threading

from http_rig import Handler, serving


def connect(url):
    """Send a request and return its connection, without waiting for the reply."""
    client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    client.sendall(b"GET / HTTP/1.0\r\n\r\n")
    return client


def test_client_that_leaves_is_not_reported(capfd):
    class Large(Handler):
        def do_GET(self):
            while True:  # until the client is seen to be gone
                self.reply(200, b"x" * 2**20)

    with serving(Large) as url:
        with connect(url) as client:
            assert client.recv(1)
        threads = [thread for thread in threading.enumerate() if "process_request" in thread.name]
        for thread in threads:
            thread.join()
    assert capfd.readouterr().err == ""


def test_fault_of_a_handler_is_reported(capfd):
    class Faulty(Handler):
        def do_GET(self):
            raise ValueError("a fault of the test")

    with serving(Faulty) as url, connect(url) as client:
        assert client.recv(1) == b""  # it has ended
    assert "ValueError: a fault of the test" in capfd.readouterr().err
