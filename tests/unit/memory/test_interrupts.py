"""Errors that are raised in a thread when it is ready for them."""

import signal
import threading

import pytest

from vcluster.memory.interrupts import DeferredInterrupt, defer


def test_an_error_waits_for_the_end_of_the_block():
    assert not defer(threading.get_ident(), ValueError("in no block"))
    done = []

    def block():
        with DeferredInterrupt():
            assert defer(threading.get_ident(), ValueError("later"))
            done.append(1)

    with pytest.raises(ValueError, match="later"):
        block()
    assert done == [1]
    assert not defer(threading.get_ident(), ValueError("in no block any more"))


def test_a_block_is_woken_and_delivers_once():
    woken = []
    with DeferredInterrupt(lambda: woken.append(1)) as block:
        defer(threading.get_ident(), ValueError("now"))
        assert woken == [1]
        with pytest.raises(ValueError, match="now"):
            block.deliver()
        block.deliver()


def test_an_inner_block_leaves_it_to_the_outer_one():
    woken = []

    def block():
        with DeferredInterrupt(lambda: woken.append(1)):
            with DeferredInterrupt() as inner:
                defer(threading.get_ident(), ValueError("later"))
                inner.deliver()
                assert woken == [1]
            defer(threading.get_ident(), ValueError("later"))
            assert woken == [1, 1]

    with pytest.raises(ValueError, match="later"):
        block()


def test_another_error_takes_precedence_and_nothing_is_left():
    def block():
        with DeferredInterrupt():
            defer(threading.get_ident(), ValueError("too late"))
            raise KeyError

    with pytest.raises(KeyError):
        block()
    with DeferredInterrupt():
        pass


def test_each_thread_has_blocks_of_its_own():
    inside, leave, raised = threading.Event(), threading.Event(), []

    def work():
        try:
            with DeferredInterrupt():
                inside.set()
                leave.wait(20)
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(20)
    error = ValueError("for that thread")
    assert defer(thread.ident, error)
    with DeferredInterrupt():
        pass
    leave.set()
    thread.join()
    assert raised == [error]


def test_ctrl_c_comes_before_an_error():
    before = signal.getsignal(signal.SIGINT)

    def interrupted():
        with DeferredInterrupt() as block:
            signal.raise_signal(signal.SIGINT)
            defer(threading.get_ident(), ValueError("after it"))
            block.deliver()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert signal.getsignal(signal.SIGINT) is before
