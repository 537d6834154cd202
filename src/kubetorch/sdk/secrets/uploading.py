"""Secrets of this process and those that the controller has."""

from __future__ import annotations

from functools import partial

from kubetorch.config.settings import config
from kubetorch.errors import SecretNotFound
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.session import Session
from kubetorch.specs import secret as specs
from kubetorch.wire.secrets import SecretView


def find(session: Session, namespace: str, name: str) -> SecretView:
    """A secret by the name that its owner gave it, or by that of its Kubernetes object.

    Raises:
        SecretNotFound: There is none.
    """
    tried = (
        specs.object_name(name, username=config.username),
        specs.object_name(name, username=None),
        name,
    )
    for object_name in dict.fromkeys(tried):
        found = session.ask(partial(_get, namespace, object_name))
        if found is not None:
            return found
    raise SecretNotFound(name, namespace)


def _get(namespace: str, object_name: str, controller: Controller) -> SecretView | None:
    return controller.secrets.get(namespace, object_name)
