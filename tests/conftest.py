import pytest

from tests.ring.gang import Gang


@pytest.fixture(scope="session")
def gang():
    workers = Gang()
    yield workers
    workers.close()
