"""Every router that a module of the service defines is part of its app, with all of its routes."""

from importlib import import_module
from pathlib import Path

from fastapi import APIRouter, FastAPI

import service
from service.app import create_app
from shared.settings import Settings

FOLDER = Path(service.__file__).parent


def test_no_router_is_left_out(tmp_path: Path) -> None:
    paths = [path for path in sorted(FOLDER.rglob("*.py")) if "APIRouter(" in path.read_text()]
    modules = [".".join(path.relative_to(FOLDER.parent).with_suffix("").parts) for path in paths]
    names = [module.removesuffix(".__init__") for module in modules]
    routers = {
        f"{name}.{variable}": value
        for name in names
        for variable, value in vars(import_module(name)).items()
        if isinstance(value, APIRouter) and not isinstance(value, FastAPI)
    }
    assert len(routers) >= len(paths) >= 10
    served = {route.endpoint for route in _routes(create_app(Settings(root=tmp_path)))}
    left_out = [name for name, router in routers.items() if not {route.endpoint for route in _routes(router)} <= served]
    assert not left_out, "service/app.py does not include them"
    assert all(router.routes for router in routers.values())


def _routes(router):
    """A router's own routes, and those of routers that it includes, which newer versions of FastAPI keep as such."""
    for route in router.routes:
        if hasattr(route, "endpoint"):
            yield route
        elif (included := getattr(route, "original_router", None)) is not None:
            yield from _routes(included)
