"""Ctrl-C counts wherever it arrives, also where Python cannot raise it."""

import sys
import time

import pytest

from jaxspec.interrupts import resend_lost_interrupts


class Interrupted:
    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error


def test_an_interrupt_inside_a_destructor_arrives_a_moment_later(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    resend_lost_interrupts()
    with pytest.raises(KeyboardInterrupt):
        Interrupted(KeyboardInterrupt())
        time.sleep(5)


def test_other_errors_of_destructors_are_reported_as_before(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: reported.append(each.exc_type))
    resend_lost_interrupts()
    Interrupted(ValueError())
    assert reported == [ValueError]
