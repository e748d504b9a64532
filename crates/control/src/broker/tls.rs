//! TLS for the broker: its certificate, which clients it demands one of, and the handshake.
//!
//! TLS 1.3 only. A port speaks TLS or plain, never both: the first byte of a link tells which of the two its client
//! speaks, so that one that took the wrong kind of URL is told so instead of left to wait.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gradwire_proto::{Fault, FaultKind};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, crypto, version};

/// First byte of a TLS handshake. A Pulsar frame starts with the high byte of its size, which is zero before the
/// client has connected.
const TLS_HANDSHAKE: u8 = 0x16;

/// Files for TLS, in PEM.
#[derive(Clone, Debug)]
pub struct BrokerTls {
    /// The broker's certificate, and those between it and its authority.
    pub certificate: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// Certificates of the authorities that clients' certificates must come from. Without it, clients need none.
    pub client_ca: Option<PathBuf>,
}

impl BrokerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// [`FaultKind::InvalidArgument`] that names the file that cannot be used.
    pub(super) fn load(&self) -> Result<TlsAcceptor, Fault> {
        let chain = certificates(&self.certificate)?;
        let key =
            PrivateKeyDer::from_pem_file(&self.key).map_err(|error| unusable(&self.key, "a private key", &error))?;
        let provider = Arc::new(crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&version::TLS13])
            .map_err(|error| Fault::new(FaultKind::System, format!("TLS 1.3 cannot be had: {error}")))?;
        let builder = match &self.client_ca {
            Some(path) => builder.with_client_cert_verifier(self.client_verifier(path, provider)?),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|error| {
            let (certificate, key) = (self.certificate.display(), self.key.display());
            let detail =
                format!("the certificate in {certificate} and the key in {key} cannot be used together: {error}");
            Fault::new(FaultKind::InvalidArgument, detail)
        })?;
        // Links are few and long: tickets for resuming them would only be more to keep.
        config.send_tls13_tickets = 0;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    fn client_verifier(
        &self,
        path: &Path,
        provider: Arc<crypto::CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>, Fault> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(|error| unusable(path, "an authority's certificate", &error))?;
        }
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|error| unusable(path, "an authority's certificate", &error))
    }
}

/// What the client of a new link speaks, by its first byte, which stays in the socket. Nothing if it closed the link.
pub(super) async fn speaks_tls(stream: &TcpStream) -> Option<bool> {
    let mut first = [0];
    match stream.peek(&mut first).await {
        Ok(1) => Some(first[0] == TLS_HANDSHAKE),
        _ => None,
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let found = found.map_err(|error| unusable(path, "a certificate", &error))?;
    if found.is_empty() {
        return Err(unusable(path, "a certificate", &"there is none in it"));
    }
    Ok(found)
}

fn unusable(path: &Path, what: &str, error: &dyn std::fmt::Display) -> Fault {
    let detail = format!("cannot take {what} from {}, which must be a file in PEM: {error}", path.display());
    Fault::new(FaultKind::InvalidArgument, detail)
}
