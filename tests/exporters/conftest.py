"""All of these tests run small models."""

from tests.one_thread import one_thread as one_thread
