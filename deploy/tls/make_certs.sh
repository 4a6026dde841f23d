#!/bin/sh
# Make a CA of one's own and the certificates of a stack, for docker-compose.tls.yml: deploy/tls/make_certs.sh [FOLDER]
# Every service gets the same certificate, which may serve and call: it names each of them, and "penstock". The CA's key
# stays in FOLDER/ca.key: keep it, or throw it away and make everything anew when the certificates end (825 days).
set -eu
folder=${1:-certs}
# Readable by the containers, whatever the umask of who makes it.
mkdir -p -m 755 "$folder"
cd "$folder"
umask 077
if [ ! -e ca.pem ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=penstock CA" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout ca.key -out ca.pem 2>/dev/null
fi
names="DNS:penstock,DNS:router,DNS:tokenizer,DNS:generation,DNS:localhost,IP:127.0.0.1"
for name in service client; do
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=penstock $name" \
        -keyout "$name.key" -out "$name.csr" 2>/dev/null
    printf "subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n" "$names" > extensions
    openssl x509 -req -in "$name.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 825 -extfile extensions \
        -out "$name.pem" 2>/dev/null
    rm "$name.csr" extensions
done
[ -e token ] || openssl rand -hex 32 > token
# Containers run as user 10001, or Prometheus as nobody: they read these, and not the CA's key.
chmod 644 ca.pem service.pem client.pem service.key token
echo "$folder: ca.pem, service.pem, service.key, client.pem, client.key, token"
