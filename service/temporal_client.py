"""The one way to Temporal: address, namespace, TLS and key as the settings say, and everything sealed."""

from collections.abc import Sequence

from temporalio.client import Client, Interceptor
from temporalio.service import TLSConfig

from service.seals import sealed_data_converter
from shared.errors import InvalidInput
from shared.settings import Settings


async def connect_once(settings: Settings, interceptors: Sequence[Interceptor] = ()) -> Client:
    """The client.

    Raises:
        RuntimeError: the server does not answer.
        InvalidInput: a file that the settings name cannot be read.
    """
    key = settings.temporal_api_key
    return await Client.connect(
        settings.temporal_address,
        namespace=settings.temporal_namespace,
        data_converter=sealed_data_converter(settings),
        interceptors=interceptors,
        tls=_tls(settings),
        api_key=key.get_secret_value() if key else None,
    )


def _tls(settings: Settings) -> TLSConfig | bool:
    ca, certificate, key = settings.temporal_tls_ca, settings.temporal_tls_cert, settings.temporal_tls_key
    if not (settings.temporal_tls or ca or certificate or key):
        return False
    if (certificate is None) != (key is None):
        raise InvalidInput("temporal_tls_cert and temporal_tls_key go together", "temporal_tls_cert")
    try:
        return TLSConfig(
            server_root_ca_cert=ca.read_bytes() if ca else None,
            client_cert=certificate.read_bytes() if certificate else None,
            client_private_key=key.read_bytes() if key else None,
            domain=settings.temporal_tls_name,
        )
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}", str(error.filename)) from error
