Gem::Specification.new do |spec|
  spec.name = "penstock-client"
  spec.version = "0.1.0"
  spec.summary = "Types and gRPC stubs of Penstock's services"
  spec.homepage = "https://github.com/penstock/penstock"
  spec.license = "Apache-2.0"
  spec.authors = ["Penstock"]
  spec.required_ruby_version = ">= 3.1"
  spec.files = Dir["lib/**/*.rb", "README.md"]
  spec.add_dependency "google-protobuf", ">= 3.21"
  spec.add_dependency "grpc", ">= 1.51"
end
