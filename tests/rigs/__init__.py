"""What tests stand on: stand-ins, drivers, programs and checks. No test lies here."""
